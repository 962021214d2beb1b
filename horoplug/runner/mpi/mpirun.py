"""``horovodrun --mpi``: builds the command line of mpirun for each implementation of MPI.

Pure functions without I/O; :mod:`horoplug.runner.mpi.mpirun_launch` runs the command. The command line never contains
values of variables, since every user of the machine can read it: Open MPI gets names (``-x NAME``), and Hydra forwards
all variables."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from horoplug.runner.checks import UsageError
from horoplug.runner.forwarding import exportable
from horoplug.runner.hosts.hosts import Host
from horoplug.runner.start.ssh import Ssh

MANY_HOSTS = 64  # from this number on, Open MPI starts its daemons directly instead of as a tree


@dataclasses.dataclass(frozen=True)
class Request:
    """The job that mpirun has to start."""

    processes: int
    hosts: Sequence[Host] = ()
    """Empty: the hosts of the batch system or, without one, this machine."""
    allocated: bool = False
    """Whether a batch system has allocated hosts, which mpirun then gets from it."""
    forwarded: Sequence[str] = ()
    """Names of the variables to forward to the ranks."""
    root: bool = False
    tcp: bool = False
    timestamps: bool = False
    output: Path | None = None
    binding: str | None = None
    more: str | None = None
    ssh: Ssh = dataclasses.field(default_factory=Ssh)
    ssh_options: Sequence[str] = ()
    """Options of the ssh program, which precede those in ``ssh``."""
    interfaces: Sequence[str] = ()


class CommandLine(NamedTuple):
    """mpirun's arguments before the program, the variables that it needs, the folders to create for it, and remarks for
    the user of one line each."""

    arguments: list[str]
    variables: dict[str, str]
    folders: list[Path]
    remarks: list[str]


class Implementation(NamedTuple):
    """An implementation of MPI: a pattern of ``mpirun --version``, the file name of its library, and the function that
    builds its command line.

    Errors of ``line``: UsageError for requests that this MPI cannot fulfil, ValueError for badly quoted arguments."""

    name: str
    version: str
    library: str
    line: Callable[[Request], CommandLine]


# ---- Open MPI and its derivatives ------------------------------------------------------------------------------------


def _with_slots(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _open_mpi(
    request: Request, *, tag: list[str], remote: str, output: Callable[..., list[str]]
) -> CommandLine:
    """``remote``: prefix of the MCA parameters for starting daemons on other hosts."""
    hosts = request.hosts
    if not hosts and not request.allocated:
        # Without a host, mpirun would limit the number of ranks to the number of cores.
        hosts = [Host("localhost", request.processes)]
    line = ["-np", str(request.processes)]
    if hosts:
        line += ["-H", _with_slots(hosts)]
    if request.root:
        line.append("--allow-run-as-root")
    line += (
        shlex.split(request.binding)
        if request.binding
        else ["--bind-to", "none", "--map-by", "slot"]
    )
    if request.tcp:
        line += ["--mca", "pml", "ob1", "--mca", "btl", "^openib,uct,ofi,usnic"]
    if request.interfaces:
        line += ["--mca", "btl_tcp_if_include", ",".join(request.interfaces)]
    if request.ssh.program != Ssh.program:
        line += ["--mca", f"{remote}_agent", shlex.join(request.ssh.program)]
    if options := [*request.ssh_options, *request.ssh.options]:
        line += ["--mca", f"{remote}_args", shlex.join(options)]
    if len(hosts) >= MANY_HOSTS:
        line += ["--mca", f"{remote}_no_tree_spawn", "true"]
        line += ["--mca", f"{remote}_num_concurrent", str(len(hosts))]
    line += output(tag, request.timestamps, request.output)
    for name in request.forwarded:
        line += ["-x", name]
    return CommandLine([*line, *_more(request)], {}, [request.output] if request.output else [], [])


def _flags(tag: list[str], timestamps: bool, folder: Path | None) -> list[str]:
    """The output flags of Open MPI 4, which writes folder/1/rank.N/stdout."""
    return [
        *tag,
        *(["--timestamp-output"] if timestamps else []),
        *(["--output-filename", str(folder)] if folder else []),
    ]


def _directives(tag: list[str], timestamps: bool, folder: Path | None) -> list[str]:
    """The output flags of Open MPI 5, which writes folder/rank.JOB.N.out.

    (Not dir=, which loses one stream of a rank if both begin at the same time.)"""
    words = [
        *tag,
        *(["timestamp"] if timestamps else []),
        *([f"file={folder}/rank"] if folder else []),
    ]
    return ["--output", ",".join(words)]


def _open_mpi_4(request: Request) -> CommandLine:
    return _open_mpi(request, tag=["--tag-output"], remote="plm_rsh", output=_flags)


def _open_mpi_5(request: Request) -> CommandLine:
    return _open_mpi(request, tag=["tag"], remote="plm_ssh", output=_directives)


def _spectrum(request: Request) -> CommandLine:
    binding = request.binding or "-bind-to socket -map-by socket -rank-by core"
    plain = dataclasses.replace(request, binding=binding, tcp=False)
    line = _open_mpi_4(plain)
    return line._replace(arguments=[*(["-tcp"] if request.tcp else []), *line.arguments])


# ---- implementations with Hydra --------------------------------------------------------------------------------------


def _hydra(
    request: Request, hosts: list[str], binding: list[str], ssh: tuple[str, str]
) -> CommandLine:
    """``ssh``: the variables for the ssh program and for its options."""
    line = ["-prepend-rank", "-np", str(request.processes), *hosts]
    line += shlex.split(request.binding) if request.binding else binding
    folders: list[Path] = []
    if request.interfaces:
        line += ["-iface", request.interfaces[0]]
    if request.output:
        folders = [request.output / f"rank.{rank}" for rank in range(request.processes)]
        line += ["-outfile-pattern", f"{request.output}/rank.%r/stdout"]
        line += ["-errfile-pattern", f"{request.output}/rank.%r/stderr"]
    program, *options = request.ssh.program
    texts = (
        program if program != "ssh" else "",
        shlex.join([*options, *request.ssh_options, *request.ssh.options]),
    )
    variables = {name: text for name, text in zip(ssh, texts, strict=True) if text}
    return CommandLine([*line, *_more(request)], variables, folders, _no_times("mpirun", request))


def _mpich(request: Request) -> CommandLine:
    line = _hydra(
        request,
        ["-hosts", _with_slots(request.hosts)] if request.hosts else [],
        ["-bind-to", "none"],
        ("HYDRA_LAUNCHER_EXEC", "HYDRA_LAUNCHER_EXTRA_ARGS"),
    )
    if request.tcp:
        line.variables["UCX_TLS"] = "tcp,sm,self"
        line.variables["FI_PROVIDER"] = "tcp"
    return line


def _intel(request: Request) -> CommandLine:
    hosts: list[str] = []
    if request.hosts:
        slots = {host.slots for host in request.hosts}
        if len(slots) == 1:  # all versions accept this form
            names = ",".join(host.name for host in request.hosts)
            hosts = ["-hosts", names, "-ppn", str(slots.pop())]
        else:
            hosts = ["-hosts", _with_slots(request.hosts)]
    ssh = "I_MPI_HYDRA_BOOTSTRAP_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    line = _hydra(request, hosts, [], ssh)
    if not request.binding:
        line.variables["I_MPI_PIN"] = "0"
    if request.tcp:
        line.variables["FI_PROVIDER"] = "tcp"
    return line


def _jsrun(request: Request) -> CommandLine:
    """One resource set per host of the allocation, with all its cores and GPUs."""
    if not request.hosts:
        raise UsageError(
            "--jsrun needs the hosts of an LSF job (LSB_MCPU_HOSTS); start it there, or with --mpi"
        )
    count = len(request.hosts)
    line = ["--np", str(request.processes), "--nrs", str(count), "--rs_per_host", "1"]
    line += ["--tasks_per_rs", str(-(-request.processes // count))]
    line += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS"]
    line += shlex.split(request.binding) if request.binding else ["--bind", "none"]
    if smpi := " ".join(
        [*(["-tcp"] if request.tcp else []), *([request.more] if request.more else [])]
    ):
        line += ["--smpiargs", smpi]
    if request.output:
        line += ["--stdio_mode", "individual"]
        line += [
            f"--stdio_{stream}={request.output}/rank.%t.{stream}" for stream in ("stdout", "stderr")
        ]
    return CommandLine(
        line, {}, [request.output] if request.output else [], _no_times("jsrun", request)
    )


# ---- the table -------------------------------------------------------------------------------------------------------

IMPLEMENTATIONS: Final = (
    Implementation("IBM Spectrum MPI", r"IBM Spectrum MPI", "libmpi_ibm.so.3", _spectrum),
    Implementation("Open MPI 5", r"Open MPI\) ([5-9]|\d\d)\.", "libmpi.so.40", _open_mpi_5),
    Implementation("Open MPI", r"Open MPI|OpenRTE", "libmpi.so.40", _open_mpi_4),
    Implementation("Intel MPI", r"Intel\(R\) MPI", "libmpi.so.12", _intel),
    Implementation("MPICH", r"HYDRA|MPICH|MVAPICH", "libmpi.so.12", _mpich),
)
"""The first one whose pattern matches is used."""

JSRUN: Final = Implementation("jsrun", "", "", _jsrun)

# Names that shells accept, without MPI's own variables.
_FORWARDED: Final = re.compile(r"(?!PMI|PRTE_|OMPI_)[A-Za-z_]\w*", re.ASCII)


def recognise(text: str) -> Implementation | None:
    """The implementation whose ``mpirun --version`` prints this text; None if unknown."""
    return next((each for each in IMPLEMENTATIONS if re.search(each.version, text)), None)


def forwarded(env: Mapping[str, str], also: Sequence[str] = ()) -> list[str]:
    """The names of the variables in ``env`` to forward to ranks on other hosts. ``also``: what ``-x`` names."""
    return sorted(name for name in exportable(env, also) if _FORWARDED.fullmatch(name))


def _more(request: Request) -> list[str]:
    return shlex.split(request.more or "")


def _no_times(name: str, request: Request) -> list[str]:
    text = f"this {name} cannot print the time before every line; it is left out"
    return [text] if request.timestamps else []
