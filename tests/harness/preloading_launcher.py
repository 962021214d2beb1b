"""``horovodrun`` whose processes on this host have imported frameworks before they begin.

    python -m tests.harness.preloading_launcher torch,horoplug.torch -np 3 --min-np 2 python train.py

Importing a framework takes up to 4 s of processor time, and an elastic job starts many processes. Here, the agent of
this host imports the frameworks once, and forks itself where it would otherwise start Python. The forks run the program
as Python would: in a session of their own, with the environment, the pipes and the parent that the agent gives to its
processes. Frameworks that start threads when they are imported cannot be preloaded."""

import builtins
import contextlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any, NoReturn

from horoplug.runner import launch
from horoplug.runner.agent import agent
from horoplug.runner.agent.links import ProcessLink
from horoplug.runner.start import connection as agent_connection
from tests.harness.template import freeze_imports, renew_process

_AGENT = "--agent"


class _Begin(BaseException):
    """Raised in a fork, so that it leaves the agent's functions and runs its program."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments


class _Fork:
    """A fork of the agent, with the part of ``subprocess.Popen``'s interface that the agent uses."""

    kept: frozenset[int] = frozenset()
    """Descriptors that the frameworks have opened."""
    stdin: None = None
    """The fork has the standard input of the agent, and gets no other."""

    def __init__(
        self,
        command: list[bytes],
        *,
        cwd: bytes,
        env: dict[bytes, bytes],
        preexec_fn: Callable[[], None],
        **_: Any,
    ) -> None:
        program, *arguments = map(os.fsdecode, command)
        assert program == sys.executable, command
        self.returncode: int | None = None
        (out, self_out), (err, self_err), (ready, self_ready) = os.pipe(), os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            preexec_fn()
            _become_process(self_out, self_err, cwd, env)  # which closes the pipes, too
            raise _Begin(arguments)
        for fd in (self_out, self_err, self_ready):
            os.close(fd)
        os.read(ready, 1)  # wait until the process has a session
        os.close(ready)
        self.stdout, self.stderr = os.fdopen(out, "rb", 0), os.fdopen(err, "rb", 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _start(command: list[bytes], **options: Any) -> Any:
    if options["stdin"] == subprocess.DEVNULL:
        return _Fork(command, **options)
    return subprocess.Popen(command, **options)  # not a rank


def _become_process(out: int, err: int, cwd: bytes, env: dict[bytes, bytes]) -> None:
    """Give a fork what a new process of the agent has."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    # The agent's objects keep their descriptors, so that they never close those of the program.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in (nothing, *_Fork.kept):
            with contextlib.suppress(OSError):  # the descriptor of the list itself
                os.fstat(fd)
                os.dup2(nothing, fd, inheritable=False)
    os.chdir(cwd)
    renew_process({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()})
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]


def _run_python(arguments: list[str]) -> None:
    """Do what ``python`` does with these arguments."""
    flag, *rest = arguments
    first = "" if flag == "-c" else os.getcwd() if flag == "-m" else os.path.dirname(flag)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *paths, *(path for path in sys.path if path not in paths)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # a new process has not imported them
    if specification := PathFinder.find_spec("sitecustomize", paths):  # that of horoplug.compat
        assert specification.loader is not None
        specification.loader.exec_module(importlib.util.module_from_spec(specification))
    if flag == "-m":
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = arguments
    module = types.ModuleType("__main__")
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    if flag == "-c":
        sys.argv[1:] = rest[1:]
        text, name = rest[0], "<string>"
    else:
        with open(flag) as file:
            text, name = file.read(), flag
        module.__file__ = flag
    exec(compile(text, name, "exec"), module.__dict__)


def _agent(modules: list[str]) -> None:
    del sys.path[0]  # the working directory
    for module in modules:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a framework has started threads"
    freeze_imports()
    _Fork.kept = frozenset(map(int, os.listdir("/proc/self/fd")))
    agent.subprocess = types.SimpleNamespace(  # type: ignore[attr-defined]
        Popen=_start,
        PIPE=subprocess.PIPE,
        DEVNULL=subprocess.DEVNULL,
        SubprocessError=subprocess.SubprocessError,
    )
    try:
        code = agent.guarded(None)
    except _Begin as begin:
        arguments = begin.arguments
    else:
        _end(code)
    _run_python(arguments)


def _end(code: int) -> NoReturn:
    """End without the frameworks' cleanup, since they were not used."""
    os._exit(code)


def main(modules: str, *arguments: str) -> int:
    """Run horovodrun with these arguments. ``modules``: the modules to import, separated by commas."""

    def link(command: list[str], *further: Any, own_stderr: bool) -> ProcessLink:
        if command[-1] == agent.__file__:
            command = [sys.executable, "-m", __spec__.name, _AGENT, *modules.split(",")]
        return ProcessLink(command, *further, own_stderr=own_stderr)

    agent_connection.ProcessLink = link  # type: ignore[assignment,misc]
    return launch.main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == _AGENT:
        _agent(sys.argv[2:])
    else:
        sys.exit(main(*sys.argv[1:]))
