"""A replacement whose program has other arrays than those of the survivors is left out, and the job goes on."""

import importlib.util
import sys

import pytest

from tests.harness.elastic_launcher import PRELOADS, launched, launcher_lines

# WIDTH is another one in replacements, as if the program had been changed. The job ends when one was left out.
TRAIN = """
import atexit, os, signal, sys
import numpy as np
import horoplug
ME = int(os.environ["HOROPLUG_ELASTIC_PROCESS"])
WIDTH = 4 if ME < 3 else 5
FILE = {file!r}
if ME >= 3:
    atexit.register(lambda: open(FILE, "w").close())
{make}

@hvd.elastic.run
def train(state):
    while True:
        if ME == 1 and state.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(one(), name="gradient")
        is_over = state.step > 20 and hvd.size() == 2 and os.path.exists(FILE)
        votes = horoplug.allreduce(np.array([float(is_over)]), name="over", op=horoplug.Sum)
        state.step += 1
        state.commit()
        if votes:
            return

train(state)
sys.stdout.write(f"done {{ME}} of {{hvd.size()}}\\n")
"""
MAKE = {
    "torch": """
import torch, horoplug.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(torch.nn.Linear(3, WIDTH), step=0)
one = lambda: torch.ones(1)
""",
    "jax": """
import jax.numpy as jnp, horoplug.jax as hvd
hvd.init()
state = hvd.elastic.JaxState(params={"w": jnp.ones((3, WIDTH))}, step=0)
one = lambda: jnp.ones(1)
""",
    "tensorflow": """
import tensorflow as tf, horoplug.tensorflow as hvd
hvd.init()
state = hvd.elastic.TensorFlowState([tf.Variable(tf.ones((3, WIDTH)))], step=0)
one = lambda: tf.ones(1)
""",
}
DIFFERENCES = {
    "torch": "the state's model.weight is float32 [5, 3], and that of rank 0 is float32 [4, 3]",
    "jax": "the state's ['params']['w'] is float32 [3, 5], and that of rank 0 is float32 [3, 4]",
    "tensorflow": "the state's variable 0 is float32 [3, 5], and that of rank 0 is float32 [3, 4]",
}


@pytest.mark.parametrize("framework", MAKE)
def test_replacement_with_other_arrays_is_left_out(framework, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    text = TRAIN.format(make=MAKE[framework], file=str(tmp_path / "left out"))
    code, out, err = launched(
        "-np", 3, "--min-np", 2, sys.executable, "-c", text, preload=PRELOADS[framework]
    )
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "done" in line) == [
        "[0]<stdout>:done 0 of 2",
        "[2]<stdout>:done 2 of 2",
    ]
    lines = launcher_lines(err)
    assert f"process 3 (rank 2) on localhost: {DIFFERENCES[framework]}" in lines
    assert "host localhost gets no new processes for now" in lines
