"""Elastic jobs on a real cluster, whose nodes and actors are killed."""

import pytest

from tests.harness.limits import scaled

pytest_plugins = ["tests.harness.ray_driver"]


def _train(steps, size, wait, die_at=None):
    """A training function. It ends after ``steps`` steps, but not before it has had ``size`` ranks ``wait`` times."""

    def train():
        import os
        import signal
        import time

        import numpy as np

        import horoplug.numpy as hvd
        from horoplug.common.elastic import ObjectState, initialize_again, run_fn
        from horoplug.ray import ray_logger

        hvd.init()
        state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0, sizes=[])

        def loop(state):
            state.sizes = [*state.sizes, hvd.size()]
            while state.step < steps or state.sizes.count(size) < wait:
                reduced = hvd.allreduce(np.ones(1), op=hvd.Sum, name="ones")[0]
                state.total += float(reduced) / hvd.size()
                state.step += 1
                node = os.environ["HOROVOD_HOSTNAME"]
                ray_logger.log(
                    {"step": state.step, "size": hvd.size(), "at": time.time(), "on": node}
                )
                if (
                    die_at is not None
                    and state.step == die_at
                    and hvd.rank() == 1
                    and hvd.size() == 3
                ):
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.01)
                state.commit()
            return hvd.rank(), state.step == state.total, state.sizes, os.environ.get("SHADE")

        return run_fn(loop, initialize_again)(state)

    return train


@pytest.mark.short(failure=True)
def test_a_killed_actor_is_replaced_and_the_results_are_in_order_of_the_ranks(on_ray):
    def use(cluster):
        from horoplug.ray import ElasticRayExecutor

        settings = ElasticRayExecutor.create_settings(min_np=2, max_np=3, timeout_s=60)
        executor = ElasticRayExecutor(settings, env_vars={"SHADE": "red"})
        executor.start()
        logged = []
        return executor.run(_train(20, 3, 2, die_at=5), callbacks=[logged.append]), logged

    results, logged = on_ray(use)
    assert [each[0] for each in results] == [0, 1, 2]
    assert all(each[1] for each in results)
    assert results[0][2].count(3) == 2
    assert {each[3] for each in results} == {"red"}
    assert logged[-1]["step"] >= 20


@pytest.mark.short
def test_hosts_of_a_discovery_are_called_by_a_resource_of_their_node(on_ray):
    """As in programs for Horovod. The main node has two further names; one host does not exist, until it does."""

    def use(cluster):
        import ray

        from horoplug.ray import ElasticRayExecutor
        from horoplug.runner.elastic.discovery import FixedHosts
        from tests.harness.ray_driver import OBJECT_STORE, remove_node

        node = cluster.add_node(
            num_cpus=2,
            resources={"node:blue": 1, "node:green": 1},
            object_store_memory=OBJECT_STORE,
        )
        discovery = FixedHosts({"blue": 1, "red": 4, "green": 1})
        settings = ElasticRayExecutor.create_settings(
            2, 2, timeout_s=60, elastic_timeout=60, discovery=discovery
        )
        executor = ElasticRayExecutor(settings, override_discovery=False)
        executor.start()

        def where():
            import horoplug.numpy as hvd

            hvd.init()
            return hvd.rank(), hvd.local_size(), ray.get_runtime_context().get_node_id()

        try:
            found = executor.run(where)
        finally:
            remove_node(cluster, node)
        merged = executor._adapter._discovery()
        return found, node.node_id, merged.find_available_hosts_and_slots(), merged.complaints

    found, node, gone, complaints = on_ray(use)
    assert found == [(0, 2, node), (1, 2, node)]
    assert gone == {}
    assert [line.split(";")[0] for line in complaints] == [
        f"no node of the cluster is called {name}" for name in ("blue", "red", "green")
    ]


def test_a_job_goes_on_without_a_killed_node_and_uses_a_new_one(on_ray):
    def use(cluster):
        import contextlib
        import time

        from horoplug.ray import ElasticRayExecutor
        from horoplug.ray.elastic import RayHostDiscovery
        from horoplug.runner.elastic.discovery import HostDiscovery
        from tests.harness.ray_driver import added_node, remove_node

        class AtMostTwo(HostDiscovery):
            """The nodes of the cluster, with two slots on the main node."""

            def find_available_hosts_and_slots(self):
                found = RayHostDiscovery().find_available_hosts_and_slots()
                return {host: min(slots, 2) for host, slots in found.items()}

        settings = ElasticRayExecutor.create_settings(
            2, 3, timeout_s=60, elastic_timeout=60, discovery=AtMostTwo()
        )
        executor = ElasticRayExecutor(settings, override_discovery=False)
        executor.start()
        sizes, times = [], []
        with added_node(cluster, 1) as node, contextlib.ExitStack() as stack:

            def on_log(value):
                sizes.append(value["size"])
                if value["size"] == 3 and not times and value["step"] > 3:
                    times.append(time.time())
                    cluster.remove_node(node, allow_graceful=False)
                elif value["size"] == 2 and len(times) == 1:
                    times.append(value["at"])
                    stack.enter_context(added_node(cluster, 1))

            results = executor.run(_train(20, 3, 2), callbacks=[on_log])
            remove_node(cluster, node)
        return results, times[1] - times[0], sizes

    results, seconds, sizes = on_ray(use)
    print(f"the job went on after {seconds:.1f} s")
    assert seconds < scaled(15)
    assert [each[0] for each in results] == [0, 1, 2]
    assert all(each[1] for each in results)
    assert set(sizes) == {2, 3}


def test_an_exception_of_every_process_ends_the_job_with_its_traceback(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor
        from horoplug.runner.run import RankError

        def fail():
            raise ValueError("no data")

        executor = RayExecutor(
            RayExecutor.create_settings(timeout_s=60), min_workers=1, max_workers=1
        )
        executor.start()
        try:
            executor.run(fail)
        except RankError as error:
            return str(error), error.traceback, repr(error.__cause__)

    text, trace, cause = on_ray(use)
    assert text.startswith("3 processes have failed before init() returned; process 2 on ")
    assert "raised ValueError: no data" in text
    assert 'raise ValueError("no data")' in trace
    assert cause == "ValueError('no data')"


def test_a_repeated_exception_is_that_of_the_process_which_has_ended_the_job(on_ray):
    """A process before it, which was replaced, has raised the same."""

    def use(cluster):
        from horoplug.ray import RayExecutor
        from horoplug.runner.run import RankError

        def fail():
            import numpy as np

            import horoplug.numpy as hvd
            from horoplug.common.elastic import ObjectState, initialize_again, run_fn

            hvd.init()
            state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)

            def loop(state):
                hvd.allreduce(np.ones(1), name="ones")
                state.commit()
                if hvd.rank() == 1:
                    raise ValueError("no data")
                hvd.allreduce(np.ones(1), name="more")

            return run_fn(loop, initialize_again)(state)

        settings = RayExecutor.create_settings(timeout_s=60)
        executor = RayExecutor(settings, min_workers=2, max_workers=2, reset_limit=1)
        executor.start()
        try:
            executor.run(fail)
        except RankError as error:
            return str(error), error.rank, repr(error.__cause__)

    text, rank, cause = on_ray(use)
    assert text.startswith("the job was formed again 1 time (reset_limit); process 2 (rank 1) on ")
    assert (rank, cause) == (1, "ValueError('no data')")


def test_too_few_slots_are_waited_for_no_longer_than_asked(on_ray):
    def use(cluster):
        from horoplug.ray import ElasticRayExecutor
        from horoplug.runner.run import RankError

        settings = ElasticRayExecutor.create_settings(min_num_proc=50, elastic_timeout=1)
        executor = ElasticRayExecutor(settings)
        executor.start()
        try:
            executor.run(lambda: None)
        except RankError as error:
            return str(error)

    text = on_ray(use)
    assert text.startswith("fewer than 50 processes")
    assert "the cluster has 6 CPUs" in text
    assert "\n" not in text


def test_room_is_requested_from_the_autoscaler_and_given_back(on_ray):
    def use(cluster):
        from unittest import mock

        from horoplug.ray import ElasticRayExecutor, RayExecutor

        asked = []
        with mock.patch(
            "ray.autoscaler.sdk.request_resources", lambda *, bundles: asked.append(bundles)
        ):
            settings = ElasticRayExecutor.create_settings(1, 2, autoscaling=True, timeout_s=60)
            executor = ElasticRayExecutor(settings)
            executor.start()
            executor.run(lambda: None)
            settings = RayExecutor.create_settings(autoscaling=True, placement_group_timeout_s=0.5)
            try:
                RayExecutor(settings, num_workers=99).start()
            except RuntimeError as error:
                return asked, str(error)

    asked, text = on_ray(use)
    assert asked == [[{"CPU": 1.0}] * 2, [], [{"CPU": 1.0}] * 99, []]
    assert text.startswith("there was no room for 99 workers with 1 CPU each within 0.5 s")


@pytest.mark.parametrize("call", ["run", "execute"])
def test_an_executor_that_was_not_started_says_so(on_ray, call):
    def use(cluster):
        from horoplug.ray import RayExecutor

        executor = RayExecutor(None, min_workers=1)
        try:
            getattr(executor, call)(lambda *_: None)
        except RuntimeError as error:
            return str(error)

    assert on_ray(use) == "the executor was not started: call start() first"
