"""Jobs on a cluster of Ray on this machine: RayExecutor, HoroplugTrainer, and a killed rank: ray_jobs.py jobs|killed"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import ray
from report import Report, error_of

import horoplug as hvd
from horoplug.ray import RayExecutor
from horoplug.runner.run import RankError

check = Report(0)
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
settings = RayExecutor.create_settings(timeout_s=60)


def reduce(number: int) -> tuple[int, int, float, int]:
    import horoplug as hvd

    hvd.init()
    total = hvd.allreduce(np.full(3, number + hvd.rank()), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total[0]), len(hvd.allgather(np.zeros(hvd.rank() + 1)))


def train(config: dict) -> None:
    import ray.train

    import horoplug as hvd

    hvd.init()
    weights = np.zeros(2)
    for _ in range(3):
        weights -= config["rate"] * hvd.allreduce(weights - hvd.rank())
    # Ray 2.43 keeps metrics with a checkpoint only.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_bytes(weights.tobytes())
        saved = ray.train.Checkpoint.from_directory(folder) if hvd.rank() == 0 else None
        ray.train.report({"weight": float(weights[0]), "size": hvd.size()}, checkpoint=saved)


def die() -> None:
    import horoplug as hvd

    hvd.init()
    for _ in range(20):
        hvd.allreduce(np.ones(3), name="step")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        hvd.allreduce(np.ones(3), name="step")


def use_an_executor() -> None:
    with check("RayExecutor"), RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        assert executor.run(reduce, args=[10]) == [(0, 2, 21.0, 3), (1, 2, 21.0, 3)]
        assert executor.run(reduce, args=[20]) == [(0, 2, 41.0, 3), (1, 2, 41.0, 3)]
    with check("an exception of a rank"), RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        error = error_of(RankError, executor.run, lambda: {}[0])
        assert "KeyError" in str(error), error


def use_a_trainer() -> None:
    with check("HoroplugTrainer"):
        import ray.train

        from horoplug.ray.train import HoroplugConfig, HoroplugTrainer

        result = HoroplugTrainer(
            train,
            train_loop_config={"rate": 0.5},
            horoplug_config=HoroplugConfig(timeout_s=60),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(name="job", storage_path=os.getcwd()),
        ).fit()
        assert result.metrics == {"weight": 0.4375, "size": 2}, result.metrics


def kill_a_rank() -> None:
    with check("RankError names the killed rank"), RayExecutor(settings, num_workers=3) as executor:
        executor.start()
        error = error_of(RankError, executor.run, die)
        assert error.rank == 1, error
        assert "has died" in str(error), error
    with check("the cluster can be used again"), RayExecutor(settings, num_workers=2) as executor:
        executor.start()
        assert [each[0] for each in executor.run(reduce, args=[1])] == [0, 1]


with check("horoplug outside of a job"):
    hvd.init()
    assert hvd.size() == 1
    hvd.shutdown()
if sys.argv[1] == "jobs":
    use_an_executor()
    use_a_trainer()
else:
    kill_a_rank()
ray.shutdown()
check.finish()
