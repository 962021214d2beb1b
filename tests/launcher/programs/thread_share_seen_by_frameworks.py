import json
import os
from pathlib import Path

rank = int(os.environ["HOROVOD_RANK"])
if rank == 0:
    import torch

    seen = torch.get_num_threads()
else:
    if rank == 1:
        import jax.numpy

        (jax.numpy.ones((100, 100)) @ jax.numpy.ones((100, 100))).block_until_ready()
    else:
        import tensorflow as tf

        tf.function(lambda x: x @ x)(tf.ones((100, 100)))
    names = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip()
        for task in os.listdir("/proc/self/task")
    ]
    seen = {1: names.count("tf_XLAEigen"), 2: names.count("tf_Compute")}[rank]
print(json.dumps(seen))
