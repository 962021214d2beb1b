"""kill -9 of rank 1 in the middle of a loop: every other rank gets an error that names it: killed.py FRAMEWORK"""

import os
import signal
import sys
import time

import numpy as np
from frameworks import load
from report import Report

SECONDS = 20  # for the error; nothing has to be waited for
framework = load(sys.argv[1])
hvd = framework.hvd
hvd.init()
check = Report(hvd.rank())
data = framework.tensor(np.ones(1000), "float32")
began = time.monotonic()
failure = None
try:
    for step in range(10**9):
        if step == 20 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step <= 20:
            began = time.monotonic()
        hvd.allreduce(data, op=hvd.Sum, name="step")
except framework.failure as error:
    failure = error
with check("the error names the killed rank"):
    assert "rank 1" in str(failure), failure
with check("the error comes in time"):
    assert time.monotonic() - began < SECONDS
check.write()
raise failure
