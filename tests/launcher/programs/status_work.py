import os
import sys

import numpy as np

import horoplug as hvd

hvd.init()
gate = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
x = np.ones(1000, np.float32)
step = 0
while True:
    hvd.allreduce(x, op=hvd.Sum, name="x")
    if step % 100 == 0:
        print(f"line {hvd.rank()} {step} " + "x" * 40)
    if step % 100 == 50:
        sys.stderr.write(f"\rbar {step}" + ("\n" if step % 200 == 50 else ""))
    step += 1
    over = np.array([os.path.exists(sys.argv[1] + ".over")])
    if hvd.allreduce(over, op=hvd.Max, name="over")[0]:
        break
