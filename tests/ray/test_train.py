"""Ray Train: HoroplugTrainer, Ray's own HorovodTrainer, and trials of Ray Tune."""

import subprocess
import sys

import pytest

from horoplug.compat import python_path
from tests.harness import program_text
from tests.harness.limits import scaled
from tests.harness.ray_driver import variables

pytest_plugins = ["tests.harness.ray_driver"]


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.short
def test_a_trainer_reports_restarts_from_a_checkpoint_and_feeds_its_ranks(on_ray, tmp_path):
    def use(cluster, folder):
        import ray
        import ray.data
        import ray.train

        from horoplug.ray.train import HoroplugConfig, HoroplugTrainer

        def train(config):
            import os
            import pathlib
            import tempfile

            import numpy as np
            import ray.train

            import horoplug.numpy as hvd

            hvd.init()
            context = ray.train.get_context()
            assert (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
            assert hvd.local_rank() == context.get_local_rank()
            first, checkpoint = 0, ray.train.get_checkpoint()
            if checkpoint is not None:
                with checkpoint.as_directory() as path:
                    first = int((pathlib.Path(path) / "epoch").read_text()) + 1
            total = 190
            if checkpoint is None:  # once is enough: Ray Data takes seconds to start
                shard = ray.train.get_dataset_shard("train")
                mine = sum(int(batch["item"].sum()) for batch in shard.iter_batches(batch_size=4))
                total = hvd.allreduce(np.array([mine]), op=hvd.Sum)[0]
            for epoch in range(first, 3):
                if epoch == 2 and checkpoint is None and hvd.rank() == 1:
                    ray.train.get_all_reported_checkpoints()  # waits until Ray has taken both reports
                    raise ValueError("broken once")
                with tempfile.TemporaryDirectory() as path:
                    (pathlib.Path(path) / "epoch").write_text(str(epoch))
                    saved = ray.train.Checkpoint.from_directory(path) if hvd.rank() == 0 else None
                    found = {"epoch": epoch, "total": int(total), "first": first}
                    found |= {"shade": os.environ["SHADE"], "factor": config["factor"]}
                    ray.train.report(found, checkpoint=saved)

        trainer = HoroplugTrainer(
            train,
            train_loop_config={"factor": 7},
            horoplug_config=HoroplugConfig(timeout_s=60, env_vars={"SHADE": "green"}),
            scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(
                name="job",
                storage_path=folder,
                failure_config=ray.train.FailureConfig(max_failures=1),
            ),
            datasets={"train": ray.data.from_items(list(range(20)), override_num_blocks=2)},
        )
        result = trainer.fit()
        return result.metrics, result.checkpoint is not None

    metrics, has_checkpoint = on_ray(use, str(tmp_path), timeout=300)
    assert metrics == {"epoch": 2, "total": 190, "first": 2, "shade": "green", "factor": 7}
    assert has_checkpoint


def test_the_ranks_of_a_trainer_become_more_when_a_node_comes(on_ray, tmp_path):
    def use(cluster, folder):
        import pathlib
        import time
        from concurrent.futures import ThreadPoolExecutor

        import ray.train

        from horoplug.ray.train import HoroplugConfig, HoroplugTrainer

        def train():
            import pathlib
            import time

            import numpy as np
            import ray.train

            import horoplug.numpy as hvd

            hvd.init()
            assert hvd.size() == ray.train.get_context().get_world_size()
            steps, checkpoint = 0, ray.train.get_checkpoint()
            if checkpoint is not None:
                with checkpoint.as_directory() as path:
                    steps = int((pathlib.Path(path) / "steps").read_text())
            has_begun_alone = checkpoint is not None
            deadline = time.time() + 60
            while hvd.size() < 2 and time.time() < deadline:
                steps += int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="one")[0])
                saved = pathlib.Path(folder) / "saved"
                saved.mkdir(exist_ok=True)
                (saved / "steps").write_text(str(steps))
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(saved))
                ray.train.get_all_reported_checkpoints()  # waits until Ray has taken the report
                (pathlib.Path(folder) / "alone").touch()
                time.sleep(0.5)  # a step that computes
            total = int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="one")[0])
            (pathlib.Path(folder) / f"result-{hvd.rank()}").write_text(
                f"{hvd.size()} {total} {has_begun_alone} {steps > 0}"
            )

        trainer = HoroplugTrainer(
            train,
            horoplug_config=HoroplugConfig(timeout_s=60),
            scaling_config=ray.train.ScalingConfig(
                num_workers=(1, 2),
                resources_per_worker={"CPU": 5},  # more than half of the first node
                elastic_resize_monitor_interval_s=0.5,
            ),
            run_config=ray.train.RunConfig(name="grows", storage_path=folder),
        )
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(trainer.fit)
            while not training.done() and not (pathlib.Path(folder) / "alone").exists():
                time.sleep(0.05)
            node = cluster.add_node(num_cpus=5)  # only the main thread can
            try:
                training.result()
            finally:
                cluster.remove_node(node)

    on_ray(use, str(tmp_path))
    found = [(tmp_path / f"result-{rank}").read_text() for rank in range(2)]
    assert found == ["2 2 True True"] * 2


def test_two_trials_of_tune_run_side_by_side_and_do_not_meet(on_ray, tmp_path):
    def use(cluster, folder):
        from ray import tune

        def trial(config):
            from ray import tune

            from horoplug.ray import RayExecutor

            def reduce(number):
                import pathlib
                import time

                import numpy as np

                import horoplug.numpy as hvd

                hvd.init()
                # Until both trials have begun, which shows that they run at the same time.
                (pathlib.Path(config["folder"]) / f"begun-{number}").touch()
                deadline = time.time() + 60
                sums = set()
                while True:
                    begun = len(list(pathlib.Path(config["folder"]).glob("begun-*")))
                    stop = np.array([float(begun == 2 or time.time() > deadline)])
                    sums.add(int(hvd.allreduce(np.array([number]), op=hvd.Sum, name="n")[0]))
                    if hvd.allreduce(stop, op=hvd.Max, name="stop")[0]:
                        return begun, sorted(sums), hvd.size()

            settings = RayExecutor.create_settings(timeout_s=60)
            with RayExecutor(settings, num_workers=2) as executor:
                executor.start()
                found = executor.run(reduce, [config["number"]])
            begun, sums, size = zip(*found, strict=True)
            tune.report({"begun": max(begun), "sums": sums[0], "size": size[0]})

        resources = tune.PlacementGroupFactory([{"CPU": 0}, {"CPU": 1}, {"CPU": 1}])
        tuner = tune.Tuner(
            tune.with_resources(trial, resources),
            param_space={"number": tune.grid_search([1, 100]), "folder": folder},
            run_config=tune.RunConfig(name="trials", storage_path=folder, verbose=0),
        )
        return [(each.config["number"], each.metrics) for each in tuner.fit()]

    found = on_ray(use, str(tmp_path))
    assert len(found) == 2
    for number, metrics in found:
        assert metrics["begun"] == 2, "the other trial did not run at the same time"
        assert metrics["sums"] == [2 * number]
        assert metrics["size"] == 2


_OLD_PROGRAM = program_text("tests/ray/programs/train_old_program.py")


def test_rays_own_horovod_trainer_runs_with_horoplug(on_ray, tmp_path):
    address = on_ray(lambda cluster: cluster.address)
    env = variables() | {"RAY_TRAIN_V2_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _OLD_PROGRAM, address, str(tmp_path)],
        env=env | {"PYTHONPATH": python_path(env)},
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert "result: 3.0 2 2 horoplug.torch" in done.stdout, (
        done.stderr[-3000:] + done.stdout[-2000:]
    )


def test_a_coordinator_keeps_the_ranks_that_have_registered(on_ray):
    def use(cluster):
        from horoplug.ray.runner import Coordinator, MiniSettings

        coordinator = Coordinator(MiniSettings(timeout_s=7))
        for rank, node in enumerate("abab"):
            coordinator.register(f"host-{node}", node, rank)
        found = coordinator.finalize_registration()
        common = coordinator.establish_rendezvous()
        coordinator.close()
        return found, common, coordinator.hostnames, coordinator.node_id_string

    found, common, hosts, nodes = on_ray(use)
    local = [each["HOROVOD_LOCAL_RANK"] for _, each in sorted(found.items())]
    cross = [each["HOROVOD_CROSS_RANK"] for _, each in sorted(found.items())]
    assert (local, cross) == ([0, 0, 1, 1], [0, 1, 0, 1])
    sizes = {"HOROVOD_LOCAL_SIZE": 2, "HOROVOD_CROSS_SIZE": 2}
    assert all(each.items() >= sizes.items() and len(each) == 4 for each in found.values())
    assert (common["HOROVOD_SIZE"], common["HOROVOD_CONTROLLER"]) == ("4", "gloo")
    assert common["HOROVOD_START_TIMEOUT"] == "7"
    assert "HOROVOD_RANK" not in common
    assert "HOROVOD_HOSTNAME" not in common
    assert common["_HOROVOD_SECRET_KEY"]
    assert (hosts, nodes) == (["host-a", "host-b"], "a:2,b:2")
