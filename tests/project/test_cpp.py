"""Runs the C++ tests, plain and under the sanitizers, and the fuzz targets, so that one summary includes all tests.

``make cpp`` builds them; a binary that is missing is a failure, not a skip."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled

SOURCES = ROOT / "csrc" / "tests"
TESTS = sorted(path.stem for path in SOURCES.rglob("*_test.cc"))
SINGLE_THREADED = {
    line
    for line in (SOURCES / "single_threaded_tests.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
FUZZERS = sorted(path.stem for path in (SOURCES / "fuzz").glob("*_fuzz.cc"))
# Removed from the environment of the tested processes, because it is not a variable of horoplug.
FUZZ_SECONDS = int(os.environ.pop("HOROPLUG_FUZZ_SECONDS", "8"))

# Seconds a binary may take. The sanitizers slow code down five to fifteen times.
LIMITS = {"release": 120, "tsan": 600, "asan": 600}
# The symbolizer of Debian's llvm-16, which the sanitizers of clang-16 do not find by themselves.
SYMBOLIZER = "external_symbolizer_path=/usr/bin/llvm-symbolizer-16"
# Tests of engines that poll, which they do only if there are as many processors as threads.
PARALLEL = {"progress_loop_test", "engine_test"}
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1 second_deadlock_stack=1 {SYMBOLIZER}",
    "ASAN_OPTIONS": f"detect_leaks=1 detect_stack_use_after_return=1 strict_string_checks=1 {SYMBOLIZER}",
    "UBSAN_OPTIONS": f"print_stacktrace=1 {SYMBOLIZER}",
}


def binary(config: str, name: str) -> Path:
    path = ROOT / "build" / config / "bin" / name
    if not path.exists():
        pytest.fail(f"{path} is not built: run make cpp", pytrace=False)
    return path


def one_processor() -> list[str]:
    """A prefix that runs a command on one processor. With a sanitizer, each new block of memory needs new pages of
    shadow memory, and the kernel flushes the TLB of every processor that runs a thread of the process: on several
    processors these interrupts take most of the time. ThreadSanitizer finds races by the order that synchronisation
    implies, so threads need not run at the same time."""
    processors = sorted(os.sched_getaffinity(0))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    return ["taskset", "--cpu-list", str(processors[worker % len(processors)])]


def run(command: list[str], limit: float) -> tuple[int, str]:
    """Exit status and output; at the limit the process is asked to name its test case, then its group is killed."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **OPTIONS},
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # doctest prints the test case that runs.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(scaled(10))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nkilled after {limit} s"
    return process.returncode, output


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        (name, config)
        for name in TESTS
        for config in LIMITS
        if config != "tsan" or name not in SINGLE_THREADED
    ],
)
@pytest.mark.short("*-release")
def test_cpp_test(name, config):
    command = [str(binary(config, name)), "--no-colors"]
    if config != "release" and name not in PARALLEL:
        command = [*one_processor(), *command]
    status, output = run(command, LIMITS[config])
    if status != 0 and "unexpected memory mapping" in output:
        # This kernel's address randomisation exceeds what the sanitizer's runtime supports.
        status, output = run(["setarch", "-R", *command], LIMITS[config])
    assert status == 0, output
    # All tests are in one program, which runs those of one file by the name that it is called by.
    ran, skipped = re.search(r"test cases: *(\d+) .* (\d+) skipped", output).groups()
    assert int(ran) > 0, "no test of this file was run"
    assert int(skipped) > 0, "the tests of other files were run, too"
    if config == "release" and name in SINGLE_THREADED:
        assert "threads started: 0" in output.splitlines(), "ThreadSanitizer must test it"


@pytest.mark.timeout(FUZZ_SECONDS + 120)
@pytest.mark.parametrize("name", FUZZERS)
def test_fuzz_target(name, tmp_path):
    """The seeds in corpus/<target>, then mutations of them for HOROPLUG_FUZZ_SECONDS."""
    corpus, artifacts = tmp_path / "corpus", tmp_path / "artifacts"
    corpus.mkdir()
    artifacts.mkdir()
    seeds = SOURCES / "fuzz" / "corpus" / name
    status, output = run(
        [
            str(binary("fuzz", name)),
            f"-max_total_time={FUZZ_SECONDS}" if FUZZ_SECONDS > 0 else "-runs=0",
            "-timeout=10",
            "-rss_limit_mb=2048",
            f"-artifact_prefix={artifacts}/",
            str(corpus),
            *([str(seeds)] if seeds.is_dir() else []),
        ],
        FUZZ_SECONDS + 90,
    )
    assert status == 0, output[-20000:]
