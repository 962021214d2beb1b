import json
import os
import sys

rank, count = int(os.environ["HOROVOD_RANK"]), int(sys.argv[1])
own = {sorted(os.sched_getaffinity(0))[rank % count]}
os.sched_setaffinity(0, own)
import numpy as np

import horoplug as hvd

hvd.init()
hvd.allreduce(np.ones(10))
masks = [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]
hvd.barrier()
sys.stdout.write(json.dumps([os.sched_getaffinity(0) == own, max(masks, key=len)]) + "\n")
