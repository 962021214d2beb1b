"""RayExecutor: functions on actors of a real cluster."""

import os
import re

import pytest

from tests.harness.ray_driver import CPUS

pytest_plugins = ["tests.harness.ray_driver"]


@pytest.mark.short
def test_ranks_of_an_executor_reduce_and_are_used_again(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor

        def reduce(number, *, factor=1):
            import os

            import numpy as np

            import horoplug.numpy as hvd

            hvd.init()
            total = hvd.allreduce(np.array([number + hvd.rank()]), op=hvd.Sum)[0] * factor
            return hvd.rank(), hvd.size(), hvd.local_rank(), int(total), os.getpid()

        with RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2) as executor:
            executor.start(extra_env_vars={"SHADE": "blue"})
            first = executor.run(reduce, args=[10])
            second = executor.run(reduce, [20], {"factor": 2})
            shades = executor.execute(lambda _: os.environ["SHADE"])
            single = executor.execute_single(lambda _: os.environ["HOROVOD_RANK"])
            variables = executor.workers[0]
            import ray

            seen = ray.get(variables.env_vars.remote())
            remote = ray.get(executor.run_remote(lambda a: a + 1, args=[1]))
        return first, second, shades, single, remote, sorted(seen)

    first, second, shades, single, remote, seen = on_ray(use)
    assert [each[:4] for each in first] == [(0, 2, 0, 21), (1, 2, 1, 21)]
    assert [each[3] for each in second] == [82, 82]
    assert [each[4] for each in first] == [each[4] for each in second]
    assert shades == ["blue", "blue"]
    assert single == "0"
    assert remote == [2, 2]
    assert "HOROVOD_RANK" in seen
    assert not [name for name in seen if "SECRET" in name]


def test_an_executable_lives_on_each_worker(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor

        class Counter:
            def __init__(self, start, *, step):
                self.value, self.step = start, step

            def add(self):
                self.value += self.step
                return self.value

        executor = RayExecutor(RayExecutor.create_settings(), num_hosts=1, num_workers_per_host=2)
        executor.start(Counter, [10], {"step": 5})
        try:
            executor.execute_single(lambda counter: counter.add())
            return executor.execute(lambda counter: counter.add())
        finally:
            executor.shutdown()

    assert on_ray(use) == [20, 15]


def test_an_exception_has_rank_traceback_and_cause_and_start_works_again(on_ray):
    def use(cluster):
        import horoplug.numpy as hvd
        from horoplug.ray import RayExecutor
        from horoplug.runner.run import RankError

        def fail():
            import numpy as np

            hvd.init()
            if hvd.rank() == 1:
                raise KeyError("lost")
            hvd.allreduce(np.ones(1), name="waiting")

        executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
        executor.start()
        found = []
        try:
            executor.run(fail)
        except RankError as error:
            found = [error.rank, str(error), error.traceback, repr(error.__cause__)]
        try:
            executor.run(fail)
        except RuntimeError as error:
            found.append(str(error))
        executor.start()
        found.append(executor.run(lambda: 3))
        executor.shutdown()
        return found

    rank, text, trace, cause, ended, again = on_ray(use)
    assert rank == 1
    assert text.startswith("rank 1: KeyError: 'lost'\n")
    assert 'raise KeyError("lost")' in trace
    assert cause == "KeyError('lost')"
    assert ended == "the executor has no workers: call start() first, also again after a failure"
    assert again == [3, 3]


@pytest.mark.short(failure=True)
def test_the_rank_that_died_is_blamed_and_not_those_that_noticed_it(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor
        from horoplug.runner.run import RankError

        def die():
            import os
            import signal

            import numpy as np

            import horoplug.numpy as hvd

            hvd.init()
            for _ in range(3):
                hvd.allreduce(np.ones(1), name="step")
            if hvd.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(np.ones(1), name="step")

        with RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=3) as executor:
            executor.start()
            try:
                executor.run(die)
            except RankError as error:
                return error.rank, str(error)

    rank, text = on_ray(use)
    assert rank == 2
    assert re.fullmatch(r"rank 2: its actor has died: Worker unexpectedly exits .{,60}", text)


def test_a_rank_that_reports_the_failure_of_another_one_is_not_blamed(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor
        from horoplug.runner.run import RankError

        def fail(has_cause):
            import os
            import time

            from horoplug.base.errors import HorovodInternalError

            if os.environ["HOROVOD_RANK"] == "0":
                raise HorovodInternalError("rank 1 has died")
            time.sleep(0.5)
            if has_cause:
                raise ValueError("the cause")

        found = []
        for has_cause in (True, False):
            with RayExecutor(RayExecutor.create_settings(), num_workers=2) as executor:
                executor.start()
                try:
                    executor.run(fail, [has_cause])
                except RankError as error:
                    found.append((error.rank, str(error).splitlines()[0]))
        return found

    (first, cause), (second, text) = on_ray(use)
    assert (first, cause) == (1, "rank 1: ValueError: the cause")
    assert second == 0
    assert "rank 1 has died" in text


def test_values_that_ranks_log_reach_the_callbacks_in_their_order(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor

        def train():
            import horoplug.numpy as hvd
            from horoplug.ray import ray_logger

            hvd.init()
            for step in range(3):
                ray_logger.log({"step": step, "rank": hvd.rank()})

        logged = []
        with RayExecutor(RayExecutor.create_settings(), num_workers=2) as executor:
            executor.start()
            executor.run(train, callbacks=[logged.append])
        return logged

    logged = on_ray(use)
    for rank in range(2):
        assert [each["step"] for each in logged if each["rank"] == rank] == [0, 1, 2]
    assert len(logged) == 6


def test_workers_on_two_nodes_and_in_the_current_placement_group(on_ray):
    def use(cluster):
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from horoplug.ray import RayExecutor
        from tests.harness.ray_driver import added_node

        def where():
            import numpy as np

            import horoplug.numpy as hvd

            hvd.init()
            total = hvd.allreduce(np.array([hvd.rank()]), op=hvd.Sum)[0]
            return hvd.rank(), hvd.local_rank(), hvd.cross_rank(), hvd.local_size(), int(total)

        def in_group():
            settings = RayExecutor.create_settings(timeout_s=60)
            with RayExecutor(settings, num_workers=2) as executor:
                executor.start()
                group = ray.util.get_current_placement_group()
                nodes = executor.execute(lambda _: ray.util.get_current_placement_group().id)
                assert nodes == [group.id, group.id]
                return executor.run(where)

        with added_node(cluster, 2):
            settings = RayExecutor.create_settings(timeout_s=60)
            with RayExecutor(settings, num_hosts=2, num_workers_per_host=2) as executor:
                executor.start()
                spread = executor.run(where)
        group = placement_group([{"CPU": 1}] * 3)
        strategy = PlacementGroupSchedulingStrategy(group)
        grouped = ray.get(ray.remote(in_group).options(scheduling_strategy=strategy).remote())
        remove_placement_group(group)
        return spread, grouped

    spread, grouped = on_ray(use)
    assert spread == [(0, 0, 0, 2, 6), (1, 1, 0, 2, 6), (2, 0, 1, 2, 6), (3, 1, 1, 2, 6)]
    assert [each[0] for each in grouped] == [0, 1]


def test_workers_see_the_gpus_of_their_node(on_ray):
    def use(cluster):
        from horoplug.ray import ElasticRayExecutor, RayExecutor
        from tests.harness.ray_driver import added_node

        def visible(*_):
            return os.environ["CUDA_VISIBLE_DEVICES"]

        with added_node(cluster, 2, gpus=2):
            settings = RayExecutor.create_settings(timeout_s=60)
            with RayExecutor(settings, num_workers=2, use_gpu=True) as executor:
                executor.start()
                found = executor.execute(visible)
            settings = ElasticRayExecutor.create_settings(1, 1, timeout_s=60)
            elastic = ElasticRayExecutor(settings, use_gpu=True)
            elastic.start()
            return found + elastic.run(visible)

    assert on_ray(use) == ["0,1", "0,1", "0,1"]


def test_a_function_begins_only_when_its_process_can_be_ended(on_ray, tmp_path):
    """A worker is killed before it has answered which process it is. The worker is an asynchronous actor, so that its
    calls do not wait for each other."""

    def use(cluster, folder):
        import os
        import time

        from horoplug.ray import actors as module
        from horoplug.ray.calls import pack_function, without_executable
        from horoplug.ray.discovery import RayHostDiscovery
        from horoplug.runner.elastic.roster import Start

        def wait_for(condition):
            until = time.monotonic() + 60
            while not condition():
                assert time.monotonic() < until
                time.sleep(0.01)

        class Worker(module.BaseHorovodWorker):
            async def process(self):
                import asyncio

                open(f"{folder}/asked", "w").close()
                await asyncio.sleep(3600)

        def function():
            open(f"{folder}/begun", "w").close()

        class Job:
            ends = ()

            def environment(self, start):
                return {}

            def ended(self, process, code, text):
                self.ends = process, text

        original, module.BaseHorovodWorker = module.BaseHorovodWorker, Worker
        try:
            (host,) = RayHostDiscovery().find_available_hosts_and_slots()
            packed = pack_function(without_executable(function), None, None)
            actors = module.Actors({"CPU": 1.0}, {}, packed, None, None)
            actors.job = job = Job()
            actors.start(Start(0, host, 0, 0, 0))
            worker = actors._live[0].actor
            wait_for(lambda: os.path.exists(f"{folder}/asked"))
            # Calls that had been made with that of process() would have begun before this one ends.
            import ray

            ray.get(worker.hostname.remote(), timeout=60)
            actors.kill(0)
            wait_for(lambda: job.ends)
            actors.close()
        finally:
            module.BaseHorovodWorker = original
        return job.ends, sorted(os.listdir(folder))

    ends, files = on_ray(use, str(tmp_path))
    assert ends == (0, "was killed, because it did not answer")
    assert files == ["asked"]


def test_processes_of_workers_have_ended_when_they_are_reported_as_ended(on_ray, tmp_path):
    """They ignore what they can, and are in the middle of a function. The workers are on two nodes, and have processes
    of their own, which end, too."""

    def use(cluster, folder):
        import os
        import time

        from horoplug.ray import RayExecutor
        from horoplug.ray.actors import Actors
        from horoplug.ray.calls import pack_function, without_executable
        from horoplug.ray.discovery import RayHostDiscovery
        from horoplug.runner.elastic.roster import Start
        from tests.harness.ray_driver import added_node
        from tests.harness.support import has_ended

        def stop():
            import os
            import signal
            import subprocess

            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            open(f"{folder}/c{child.pid}", "w").close()
            name = f"{folder}/{os.getpid()}"
            open(name + ".new", "w").close()
            os.rename(name + ".new", name)
            os.kill(os.getpid(), signal.SIGSTOP)  # cannot answer Ray

        def stopped(number):
            until = time.monotonic() + 60
            while len(found := [n for n in os.listdir(folder) if n.isdecimal()]) < number:
                assert time.monotonic() < until
                time.sleep(0.01)
            return found

        def running():
            return [name for name in os.listdir(folder) if not has_ended(name.lstrip("c"))]

        class Job:
            def __init__(self):
                self.ends = {}

            def environment(self, start):
                return {}

            def ended(self, process, code, text):
                self.ends[process] = running(), text

        with added_node(cluster, 1):
            hosts = list(RayHostDiscovery().find_available_hosts_and_slots())
            function = pack_function(without_executable(stop), None, None)
            actors = Actors({"CPU": 1.0}, {}, function, None, None)
            actors.job = job = Job()
            begun = []
            for number, host in enumerate(hosts):
                actors.start(Start(number, host, number, 0, 0))
                begun.append(stopped(number + 1))
                actors.kill(number)
                until = time.monotonic() + 60
                while number not in job.ends:
                    assert time.monotonic() < until
                    time.sleep(0.01)
            actors.close()
            executor = RayExecutor(RayExecutor.create_settings(), num_workers=2)
            executor.start()
            executor.run_remote(stop)
            begun.append(stopped(len(hosts) + 2))
            executor.shutdown()
            return len(hosts), [len(each) for each in begun], job.ends, running()

    hosts, begun, ends, left = on_ray(use, str(tmp_path))
    assert hosts == 2
    assert begun == [1, 2, 4]
    assert ends == {number: ([], "was killed, because it did not answer") for number in range(2)}
    assert left == []


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_too_few_cpus_gpus_or_nodes_are_reported_at_once(on_ray):
    def use(cluster):
        from horoplug.ray import RayExecutor
        from horoplug.ray.placement import PlacementError

        texts, kinds = [], []
        for numbers in (
            {"num_workers": 99},
            {"num_workers": 1, "use_gpu": True},
            {"num_hosts": 2},
            {"num_workers": 1, "cpus_per_worker": 50},
        ):
            try:
                RayExecutor(RayExecutor.create_settings(), **numbers).start()
            except PlacementError as error:
                texts.append(str(error))
                kinds.append(isinstance(error, TimeoutError))  # as Horovod's
        return texts, kinds

    (cpus, gpus, hosts, large), kinds = on_ray(use)
    assert kinds == [True] * 4
    assert "no room for 99 workers with 1 CPU each" in cpus
    assert f"the cluster has {CPUS} CPUs (" in cpus
    assert "on 1 node;" in cpus
    assert "create_settings(autoscaling=True)" in cpus
    assert "and 0 GPUs on 1 node" in gpus
    assert "on 2 nodes: the cluster has" in hosts
    assert "50 CPUs each" in large
    assert not [text for text in (cpus, gpus, hosts, large) if "\n" in text]


def test_a_busy_cluster_is_waited_for_until_the_time_limit(on_ray):
    def use(cluster):
        import ray

        from horoplug.ray import RayExecutor
        from horoplug.ray.placement import PlacementError
        from tests.harness.ray_driver import CPUS

        class Busy:
            def ready(self):
                return True

        busy = ray.remote(Busy).options(num_cpus=CPUS - 1).remote()
        ray.get(busy.ready.remote())
        settings = RayExecutor.create_settings(placement_group_timeout_s=0.5)
        executor = RayExecutor(settings, num_workers=2)
        try:
            executor.start()
        except TimeoutError as error:  # as Horovod's
            text = str(error)
            assert type(error) is PlacementError, error  # noqa: PT017
        ray.kill(busy)
        executor.settings.placement_group_timeout_s = 60
        with executor:
            executor.start()
            return text, executor.run(lambda: 1)

    text, results = on_ray(use)
    assert text.startswith("there was no room for 2 workers with 1 CPU each within 0.5 s: ")
    assert results == [1, 1]


def test_functions_that_cannot_be_pickled_are_reported_in_one_line(on_ray):
    def use(cluster):
        import threading

        from horoplug.ray import RayExecutor

        lock = threading.Lock()

        def locked():
            return lock

        texts = []
        with RayExecutor(RayExecutor.create_settings(), num_workers=1) as executor:
            executor.start()
            for function, args in ((locked, []), (len, [lock]), (3, [])):
                try:
                    executor.run(function, args)
                except TypeError as error:
                    texts.append(str(error))
            try:
                executor.run(threading.Lock)
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    function, argument, number, result = on_ray(use)
    assert re.match(r"the function \S*locked, or an argument, cannot be pickled.*lock", function)
    assert re.search(r"workers: the variable lock of \S*locked, a _thread.lock, ", function)
    assert "workers: args[0], a _thread.lock, cannot be pickled" in argument
    assert number == "horoplug.ray wants a function, not 3"
    assert result.startswith("rank 0: its result cannot be returned: ")
    assert not [text for text in (function, argument, number) if "\n" in text]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({}, "give the number of workers"),
        ({"num_workers": 1, "num_hosts": 1}, "give the number of workers"),
        ({"num_workers": 0}, "at least 1 worker"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, "at least 1"),
        ({"num_workers": 2, "min_workers": 1}, "min_workers for an elastic job"),
        ({"num_workers": 2, "gpus_per_worker": 1}, "use_gpu is False"),
        ({"min_workers": 3, "max_workers": 2}, "min_workers 3 is more than max_workers 2"),
    ],
)
def test_wrong_numbers_are_refused(on_ray, numbers, text):
    def use(cluster):
        from horoplug.ray import RayExecutor

        try:
            RayExecutor(RayExecutor.create_settings(), **numbers)
        except ValueError as error:
            return str(error)

    assert text in on_ray(use)


def test_errors_about_the_start_name_the_argument(on_ray):
    """Ranks that do not come, and a limit that is none."""

    def use(cluster):
        from horoplug.ray import RayExecutor

        def join():
            import os
            import time

            import horoplug.numpy as hvd

            if os.environ["HOROVOD_RANK"] == "1":
                time.sleep(5)
            hvd.init()

        texts = []
        for seconds in (1, -1):
            settings = RayExecutor.create_settings(timeout_s=seconds)
            try:
                with RayExecutor(settings, num_workers=2) as executor:
                    executor.start()
                    executor.run(join)
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}".partition("\n")[0])
        return texts

    late, wrong = on_ray(use)
    assert "rank 1 did not connect within 1 s (rank 0 has waited; timeout_s sets how long)" in late
    assert wrong == "ValueError: timeout_s=-1 is wrong: it must be a positive number of seconds"
