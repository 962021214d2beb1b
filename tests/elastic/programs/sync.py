import os
import time
from pathlib import Path

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object
from horoplug.rendezvous.elastic import member
from horoplug.rendezvous.elastic.messages import Ready
from tests.harness.elastic_process import ME, say

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
    if isinstance(message, Ready) and ME == 2:
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
                write("localhost:1\n")
            wait_for("told", lambda: state.told is not None)
            say("told", int(state.told))
            if hvd.rank() == 0:
                write("localhost:3\n")
            wait_for("ready", (folder / "ready").exists)
        state.commit()
    say("done", hvd.rank(), hvd.size(), state.step, state.value)


hvd.init()
state = State(broadcast_object, hvd.rank, step=0, value=0.0)
run_fn(train, initialize_again)(state)
