"""Who takes part in the synchronisation of the state is decided once, with the membership, and programs learn at once
that processes should come or go."""

import re
import sys

from horoplug.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from horoplug.base.host_updates import HostUpdateResult
from horoplug.common.elastic import ObjectState, run_fn
from tests.harness import program_text
from tests.harness.elastic_launcher import launched

# The members of the first membership stop, since a slot is gone. Before they are ready for the next one, another slot
# is there, and its process is ready: each waits for what the others have done, without a commit.
PROGRAM = program_text("tests/elastic/programs/sync.py")


def test_members_that_stop_since_a_slot_is_gone_synchronise_with_a_newcomer(tmp_path):
    """They also go on if a state's ``on_hosts_updated`` raises an exception."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    code, out, err = launched(
        *("-np", 2, "--min-np", 1, "--max-np", 3, "--host-discovery-script"),
        *(f"cat {tmp_path}/hosts", sys.executable, "-c", PROGRAM),
        FOLDER=str(tmp_path),
    )
    assert code == 0, out + err
    assert out.count(f"told {int(HostUpdateResult.removed)}") == 2
    first = [f"{rank} 2 0 0.0" for rank in range(2)]
    later = [f"{rank} 3 3 6.0" for rank in range(3)]
    assert sorted(re.findall(r"enters (.*)", out)) == sorted(first + later)
    assert sorted(re.findall(r"done (.*)", out)) == [f"{rank} 3 5 12.0" for rank in range(3)]


class _State(ObjectState):
    """Records what the loop does with it."""

    def __init__(self):
        super().__init__(lambda value: value, lambda: 0, step=0)
        self.log = []

    def save(self):
        if "train" in self.log and "fail" not in self.log:
            self.log.append("fail")
            raise HorovodInternalError("the step of a GPU has failed")
        super().save()

    def restore(self):
        self.log.append("restore")
        super().restore()

    def sync(self):
        self.log.append("sync")


def test_failure_that_is_found_by_saving_the_state_after_an_interrupt_is_restored():
    """The operations of a GPU may fail after ``check_host_updates``, which saves nothing, has stopped the ranks."""
    state = _State()

    def train(state):
        state.log.append("train")
        if state.log.count("train") == 1:
            raise HostsUpdatedInterrupt(skip_sync=True)

    run_fn(train, lambda: state.log.append("reset"))(state)
    assert state.log == ["sync", "train", "fail", "restore", "reset", "sync", "train"]


def test_interrupt_before_the_state_was_synchronised_does_not_skip_that():
    """A reset callback interrupts the loop again."""
    state = _State()
    state.log.append("fail")
    interrupts = iter([HostsUpdatedInterrupt(skip_sync=True)])

    def callback():
        state.log.append("callback")
        for interrupt in interrupts:
            raise interrupt

    state.register_reset_callbacks([callback])

    def train(state):
        state.log.append("train")
        if state.log.count("train") == 1:
            raise HostsUpdatedInterrupt

    run_fn(train, lambda: None)(state)
    assert state.log[1:] == ["sync", "train", "callback", "callback", "sync", "train"]
