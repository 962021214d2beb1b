import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodConfig, HorovodTrainer


def train(config):
    import horovod.torch as hvd
    import ray.train
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    ray.train.report(
        {"total": total, "size": hvd.size(), "local": hvd.local_size(), "from": hvd.__name__}
    )


ray.init(
    address=sys.argv[1],
    log_to_driver=False,
    runtime_env={"worker_process_setup_hook": "horoplug.compat.install"},
)
trainer = HorovodTrainer(
    train,
    train_loop_config={},
    horovod_config=HorovodConfig(timeout_s=60),
    scaling_config=ScalingConfig(num_workers=2, trainer_resources={"CPU": 0}),
    run_config=RunConfig(storage_path=sys.argv[2], verbose=0),
)
metrics = trainer.fit().metrics
print("result:", metrics["total"], metrics["size"], metrics["local"], metrics["from"])
