"""``horoplug``: one command for what the package does.

    horoplug run -np 4 python train.py      horovodrun, with all of its flags
    horoplug bench -np 2                    the speed of the collectives
    horoplug check                          what this installation supports, and why not
    horoplug completion bash                what a shell needs to complete these commands

Exit codes: those of the command; 2 for a wrong command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

_FILES = ("command", "hostfile", "config_file", "output_filename", "json", "host_discovery_script")


class Command(NamedTuple):
    help: str
    run: Callable[[Sequence[str]], int]
    parser: Callable[[], argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. ``arguments``: without the program's name."""
    words = sys.argv[1:] if arguments is None else arguments
    names, rest = words[:1], words[1:]
    if names and names[0] in COMMANDS:
        return COMMANDS[names[0]].run(rest)
    if names and not names[0].startswith("-"):
        print(
            f"horoplug: no command {names[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr
        )
        return 2
    _summary().parse_args(names or ["--help"])
    return 0


def _run(words: Sequence[str]) -> int:
    from horoplug.runner.launch import main as launch

    return launch(words)


def _run_parser() -> argparse.ArgumentParser:
    from horoplug.runner.command.arguments import build_parser

    return build_parser()


def _bench(words: Sequence[str]) -> int:
    from horoplug.bench import main as bench

    return bench(words)


def _bench_parser() -> argparse.ArgumentParser:
    from horoplug.bench import build_parser

    return build_parser()


def _check(words: Sequence[str]) -> int:
    _check_parser().parse_args(words)
    return _run(["--check-build", "--verbose"])


def _check_parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="horoplug check",
        description="Show what this installation supports and why a library cannot be used, the launcher of this "
        "process, and what MPI and CUDA offer here.",
    )


def _completion(words: Sequence[str]) -> int:
    args = _completion_parser().parse_args(words)
    try:
        import shtab
    except ImportError:
        print("horoplug: pip install shtab, which writes the completions", file=sys.stderr)
        return 2
    parser = _run_parser()
    if args.program == "horoplug":
        parser = _summary()
        commands = parser.add_subparsers()
        for name, command in COMMANDS.items():
            of = command.parser()
            _complete_files(of, shtab.FILE)
            commands.add_parser(name, parents=[of], add_help=False, help=command.help)
    _complete_files(parser, shtab.FILE)
    print(shtab.complete(parser, args.shell))
    return 0


def _complete_files(parser: argparse.ArgumentParser, kind: object) -> None:
    """Mark the arguments that are files as shtab expects it; the program of a job is one, too."""
    for action in parser._actions:
        if action.dest in _FILES:
            vars(action)["complete"] = kind


def _completion_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horoplug completion",
        description='Print what a shell needs to complete a command. For bash: eval "$(horoplug completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    parser.add_argument(
        "program", nargs="?", choices=("horoplug", "horovodrun"), default="horoplug"
    )
    return parser


def _summary() -> argparse.ArgumentParser:
    from horoplug.runner.diagnosis.check_build import version

    lines = (f"  {name:<12}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="horoplug",
        usage="horoplug COMMAND ...",
        description="Commands:\n" + "\n".join(lines) + "\n\nhoroplug COMMAND --help describes one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version())
    return parser


COMMANDS = {
    "run": Command("start a program as the ranks of a job: horovodrun", _run, _run_parser),
    "bench": Command("measure the collectives by message size", _bench, _bench_parser),
    "check": Command("show what this installation supports, and why not", _check, _check_parser),
    "completion": Command("complete these commands in a shell", _completion, _completion_parser),
}
