import os
import signal
import subprocess
import sys

import numpy as np

import horoplug as hvd
from horoplug.common.elastic import ObjectState, initialize_again, run_fn
from horoplug.common.objects import broadcast_object
from tests.harness.elastic_process import ME, say


def cancel_step():
    command = ["squeue", "-h", "-s", "-o", "%i", "-j", os.environ["SLURM_JOB_ID"]]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    (step,) = [each for each in shown if each.partition(".")[2].isdecimal()]
    subprocess.run(["scancel", step], check=True)


victim, action, size = sys.argv[1:]
hvd.init()
state = ObjectState(broadcast_object, hvd.rank, step=0, left=20)


def train(state):
    while state.left:
        # Once: step 5 may be done again.
        if state.step == 5 and int(victim) == ME and hvd.size() == 4:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            cancel_step()
        hvd.allreduce(np.ones(10), name="gradient")
        state.step += 1
        state.left -= hvd.size() == int(size) and state.step > 6
        state.commit()


run_fn(train, initialize_again)(state)
say("done", ME, "on", os.environ["HOROVOD_HOSTNAME"], "rank", hvd.rank(), "of", hvd.size())
