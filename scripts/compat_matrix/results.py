"""Runs the programs of a row, and keeps what they found in build/versions/results, one file for each row."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from scripts.compat_matrix.environment import ROOT, Environment, wheel
from scripts.compat_matrix.programs import FOLDER, PROGRAMS, Program
from scripts.compat_matrix.rows import Row

RESULTS = ROOT / "build" / "versions" / "results"
BUILD = ROOT / "build" / "versions"


def _group_end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _command(program: Program, environment: Environment, row: Row) -> list[str]:
    is_mpich = (environment.bin / "mpichversion").exists()
    places = {
        "bin": environment.bin,
        "examples": environment.work / "examples",
        "backend": row.variables.get("KERAS_BACKEND", ""),
        # The ranks that are left get time to report.
        "mpirun": ""
        if program.dies is None
        else "-disable-auto-cleanup"
        if is_mpich
        else "--enable-recovery",
    }
    return shlex.split(program.command.format(**places))


def run(program: Program, environment: Environment, row: Row) -> dict[str, object]:
    """What one program found: the names of passed checks, the failed ones with their texts, and its seconds."""
    files = environment.work / "found"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    temporary = tempfile.mkdtemp(prefix="v")  # short, since it has Ray's sockets
    variables = environment.variables() | program.variables
    variables |= {
        "HOROPLUG_VERSIONS_RESULTS": str(files),
        "TMPDIR": temporary,
        "RAY_TMPDIR": temporary,
    }
    began = time.monotonic()
    log = environment.work / "output.txt"
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                _command(program, environment, row),
                cwd=environment.work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                code = process.wait(program.seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _group_end(process)
                process.wait()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    text = log.read_text(errors="replace")
    passed, failed = _judge(program, files, code, text)
    if failed:
        kept = RESULTS / f"{row.name}-{re.sub(r'[^a-z0-9]+', '-', program.name.lower())}.log"
        kept.write_text(text)
    seconds = round(time.monotonic() - began, 1)
    return {"passed": passed, "failed": failed, "seconds": seconds}


def _judge(program: Program, files: Path, code: int | None, text: str):
    """The checks that passed on all ranks, and the failures."""
    failed: dict[str, str] = {}
    ranks = [rank for rank in range(program.ranks) if rank != program.dies]
    found = []
    for rank in ranks:
        file = files / f"{rank}.json"
        if file.exists():
            found.append(json.loads(file.read_text()))
            failed |= found[-1]["failed"]
        else:
            failed[f"rank {rank} reports"] = "it has written no results"
    passed = [name for name in (found[0]["passed"] if found else []) if name not in failed]
    if code is None:
        failed["ends"] = f"not within {program.seconds} s"
    elif (code == 0) != (program.dies is None):
        failed["exit code"] = str(code)
    elif program.says and not re.search(program.says, text):
        failed["output"] = f"it does not contain {program.says}"
    else:
        passed.append("exit code")
    return passed, failed


def run_row(row: Row) -> dict[str, object]:
    """Makes the environment, runs the programs, removes the environment."""
    environment = Environment(row, BUILD / row.name)
    RESULTS.mkdir(parents=True, exist_ok=True)
    found: dict[str, object] = {"row": row.name, "date": time.strftime("%Y-%m-%d"), "programs": {}}
    try:
        environment.make()
        found |= {"versions": environment.versions(), "python": environment.python()}
        content = wheel(row.python).read_bytes()
        found["wheel"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
        shutil.copytree(ROOT / "examples", environment.work / "examples")
        for file in (ROOT / FOLDER).glob("*.py"):
            shutil.copy(file, environment.work)
        for program in PROGRAMS[row.programs]:
            result = run(program, environment, row)
            found["programs"][program.name] = result
            failed = "".join(
                f"\n    {name}: {text[:300]}" for name, text in result["failed"].items()
            )
            counts = f"{len(result['passed'])} passed, {len(result['failed'])} failed"
            print(
                f"{row.name}: {program.name}: {counts}, {result['seconds']} s{failed}", flush=True
            )
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found["error"] = str(error)
        print(f"{row.name}: {str(error)[:300]} ... {str(error)[-700:]}", flush=True)
    finally:
        if not os.environ.get("HOROPLUG_VERSIONS_KEEP"):
            environment.remove()
    (RESULTS / f"{row.name}.json").write_text(json.dumps(found, indent=1))
    return found


def known(row: Row) -> dict[str, object] | None:
    """The results of the last run of a row."""
    file = RESULTS / f"{row.name}.json"
    return json.loads(file.read_text()) if file.exists() else None
