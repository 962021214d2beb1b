"""Mistakes in the use of ``horoplug``."""

import numpy as np

import horoplug as hvd

x = np.ones(3)
hvd.rank() + ""  # wrong
hvd.allredcue(x)  # wrong
hvd.allreduce("x")  # wrong
hvd.allreduce(x, op="sum")  # wrong
hvd.allreduce(x, reduction=hvd.Sum)  # wrong
hvd.allreduce([x, x], op=hvd.Sum, name=3)  # wrong
hvd.grouped_allreduce(x)  # wrong
hvd.broadcast(x)  # wrong
hvd.broadcast(x, "0")  # wrong
hvd.synchronize("x")  # wrong
hvd.barrier([0, 1])  # wrong
hvd.join() + ""  # wrong
hvd.start_timeline(3)  # wrong
hvd.run(print, num_proc="2")  # wrong
