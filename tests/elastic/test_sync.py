"""Who takes part in the synchronisation of the state is decided once, with the membership, and programs learn at once
that processes should come or go."""

import re
import sys

from horoplug.base.errors import HorovodInternalError, HostsUpdatedInterrupt
from horoplug.base.host_updates import HostUpdateResult
from horoplug.common.elastic import ObjectState, run_fn
from tests.harness.elastic_launcher import PRELUDE, launched

# The members of the first membership stop, since a slot is gone. Before they are ready for the next one, another slot
# is there, and its process is ready: each waits for what the others have done, without a commit.
PROGRAM = (
    PRELUDE
    + """
from horoplug.rendezvous.elastic import member

folder = Path(os.environ["FOLDER"])

def wait_for(name, condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, name
        time.sleep(0.01)

def write(text):
    (folder / f"hosts.{ME}").write_text(text)
    (folder / f"hosts.{ME}").replace(folder / "hosts")

def say_and_tell(store, message, say=member._say):
    say(store, message)
    if isinstance(message, member.Ready) and ME == 2:
        (folder / "ready").touch()

member._say = say_and_tell

class State(ObjectState):
    told = None

    def on_hosts_updated(self, timestamp, change):
        super().on_hosts_updated(timestamp, change)
        self.told = change
        if ME == 1:
            raise RuntimeError("on purpose")

def train(state):
    say("enters", hvd.rank(), hvd.size(), state.step, state.value)
    settings = broadcast_object({"lr": 0.1} if hvd.rank() == 0 else None)
    assert settings == {"lr": 0.1}, settings
    while state.step < 5:
        state.value += float(hvd.allreduce(np.ones(1), op=hvd.Sum, name="step")[0])
        state.step += 1
        if state.step == 3 and hvd.size() == 2:
            if hvd.rank() == 0:
                write("localhost:1\\n")
            wait_for("told", lambda: state.told is not None)
            say("told", int(state.told))
            if hvd.rank() == 0:
                write("localhost:3\\n")
            wait_for("ready", (folder / "ready").exists)
        state.commit()
    say("done", hvd.rank(), hvd.size(), state.step, state.value)

hvd.init()
state = State(broadcast_object, hvd.rank, step=0, value=0.0)
run_fn(train, initialize_again)(state)
"""
)


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
