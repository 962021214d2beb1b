"""Errors of usage in the terms of the command line and of Python."""

import pytest

from horoplug.runner.checks import UsageError
from horoplug.runner.command.arguments import parse
from horoplug.runner.hosts.hosts import assign_ranks, parse_hosts
from horoplug.runner.launch import as_scheduled
from horoplug.runner.start.allocation import allocation
from horoplug.runner.terms import COMMAND_LINE, Terms

pytestmark = pytest.mark.short


@pytest.mark.parametrize(
    ("call", "flags", "arguments"),
    [
        (
            lambda: parse(["-np", "0", "true"]),
            "argument -np/--num-proc: at least 1 is wanted, not 0 (horovodrun --help lists the flags)",
            "num_proc: at least 1 is wanted, not 0",
        ),
        (
            lambda: parse(["-H", "a", "-hostfile", "b", "true"]),
            "argument -hostfile/--hostfile: not allowed with argument -H/--hosts",
            "hostfile: not allowed with hosts",
        ),
        (
            lambda: parse_hosts("a:x"),
            "-H wants host:slots,host:slots, for example localhost:4, not 'a:x'",
            "hosts wants host:slots,host:slots, for example localhost:4, not 'a:x'",
        ),
        (
            lambda: assign_ranks(parse_hosts("localhost:2"), 5),
            "-np 5 is more than localhost:2 has: 2 slots; give fewer, or name more hosts or slots with -H",
            "num_proc 5 is more than localhost:2 has: 2 slots; give fewer, or name more hosts or slots with hosts",
        ),
        (
            lambda: as_scheduled(parse(["true"])),
            "how many processes? Give -np N",
            "how many processes? Give num_proc N",
        ),
        (
            lambda: allocation({"PBS_NODEFILE": "/nonesuch"}),
            "PBS has set PBS_NODEFILE=/nonesuch, but: No such file or directory; name the hosts with -H",
            "PBS has set PBS_NODEFILE=/nonesuch, but: No such file or directory; name the hosts with hosts",
        ),
    ],
)
def test_an_error_of_usage_names_flags_or_arguments(call, flags, arguments):
    with pytest.raises(UsageError) as caught:
        call()
    assert (str(caught.value), caught.value.text(COMMAND_LINE)) == (flags, flags)
    assert caught.value.text(Terms()) == arguments
