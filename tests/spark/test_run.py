"""horoplug.spark.run on a session with two slots: results, output, failures, limits, and what others see of a job."""

import base64
import concurrent.futures
import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import horoplug.spark
from horoplug.compat.finder import Finder
from horoplug.spark import service, task, tasks
from horoplug.spark.barrier import BarrierJob, Options
from horoplug.spark.session import active_context, reason
from tests.harness.limits import scaled
from tests.harness.spark_cluster import session
from tests.harness.support import environment, until

SECRET = bytes(range(65, 97))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="module", autouse=True)
def spark(folder):
    logged = {"spark_eventLog_enabled": "true", "spark_eventLog_compress": "false"}
    (folder / "events").mkdir()
    with session("local[2]", folder, spark_eventLog_dir=f"file:{folder}/events", **logged) as spark:
        yield spark


def run(function, *args, **options):
    """The results and the ranks' output."""
    out, err = io.StringIO(), io.StringIO()
    found = horoplug.spark.run(function, args, stdout=out, stderr=err, **options)
    return found, out.getvalue(), err.getvalue()


def failure(function, *args, **options):
    with pytest.raises(horoplug.spark.RankError) as caught:
        run(function, *args, **options)
    return caught.value


def active_jobs(spark):
    return list(spark.sparkContext.statusTracker().getActiveJobsIds())


@pytest.mark.short
def test_results_come_by_rank_and_output_has_the_rank_before_it():
    def train(factor):
        import numpy as np

        import horoplug as hvd

        hvd.init()
        print("out of", hvd.rank())
        os.write(2, b"err without newline")
        total = hvd.allreduce(np.ones(1) * factor, op=hvd.Sum)[0]
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), float(total)

    found, out, err = run(train, 3)
    assert found == [(0, 2, 0, 1, 6.0), (1, 2, 1, 1, 6.0)]
    assert sorted(out.splitlines()) == ["[0]<stdout>:out of 0", "[1]<stdout>:out of 1"]
    assert sorted(err.splitlines()) == [f"[{r}]<stderr>:err without newline" for r in (0, 1)]


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_ranks_are_tasks_of_a_barrier_job_but_with_dynamic_allocation(is_dynamic, monkeypatch):
    sizes = []
    join = BarrierJob._join

    def see(self, task):
        sizes.append(task.tasks)
        join(self, task)

    monkeypatch.setattr(BarrierJob, "_join", see)
    monkeypatch.setattr(sys.modules["horoplug.spark.run"], "is_dynamic", lambda _: is_dynamic)
    assert run(lambda: 1)[0] == [1, 1]
    assert sizes == ([0, 0] if is_dynamic else [2, 2])


def test_an_exception_has_rank_and_traceback_and_no_rank_runs_twice(spark, tmp_path):
    def train():
        import numpy as np

        import horoplug as hvd

        hvd.init()
        with open(tmp_path / "ran", "a") as file:
            print(hvd.rank(), file=file)
        if hvd.rank() == 1:
            raise KeyError("a wrong key")
        hvd.allreduce(np.ones(1))

    began = time.monotonic()
    error = failure(train)
    assert time.monotonic() - began < scaled(20)
    assert str(error).startswith("rank 1: KeyError: 'a wrong key'\n")
    assert error.rank == 1
    assert 'raise KeyError("a wrong key")' in error.traceback
    assert isinstance(error.__cause__, KeyError)
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1"]
    until(lambda: not active_jobs(spark))


@pytest.mark.short(failure=True)
def test_a_killed_rank_is_named_and_not_one_that_fails_because_of_it():
    def train():
        import numpy as np

        import horoplug as hvd

        hvd.init()
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(1))

    error = failure(train)
    assert str(error) == "rank 0 was killed by signal 9 (SIGKILL); the other ranks were ended"
    assert error.rank == 0


def test_a_rank_that_ignores_the_end_of_the_job_is_killed(tmp_path):
    def train():
        import horoplug as hvd

        hvd.init()
        if hvd.rank() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (tmp_path / "pid").write_text(str(os.getpid()))
            hvd.barrier()
            while True:
                signal.pause()
        hvd.barrier()
        raise ValueError

    assert failure(train).rank == 1
    pid = (tmp_path / "pid").read_text()
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_two_jobs_run_at_a_time(tmp_path):
    def train(name, other):
        import horoplug as hvd

        hvd.init()
        (tmp_path / name).touch()
        for _ in range(3000):
            if (tmp_path / other).exists():
                return name, hvd.size()
            time.sleep(0.01)
        return None

    with concurrent.futures.ThreadPoolExecutor() as threads:
        jobs = [
            threads.submit(horoplug.spark.run, train, names, num_proc=1)
            for names in (("a", "b"), ("b", "a"))
        ]
        assert [job.result(120) for job in jobs] == [[("a", 1)], [("b", 1)]]


def test_variables_reach_the_ranks_and_leave_no_trace_in_sparks_workers(spark, monkeypatch):
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("MY_TOKEN", "secret")

    def train():
        names = ("HOROVOD_CYCLE_TIME", "HOROVOD_RANK", "MY_TOKEN", "MINE")
        return [os.environ.get(name) for name in names]

    assert run(train, num_proc=1, env={"MINE": "1"})[0] == [["2", "0", None, "1"]]
    seen = spark.sparkContext.parallelize([0, 1], 2).map(lambda _: dict(os.environ)).collect()
    assert not any(name.startswith("HOROVOD_") for env in seen for name in env)


def test_programs_of_horovod_run_under_its_name(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])

    def train():
        from horovod.common.basics import HorovodBasics
        from horovod.spark.task import get_available_devices

        return HorovodBasics.__module__, get_available_devices()

    assert run(train, num_proc=1)[0] == [("horoplug.compat.basics", [])]


def test_the_secret_is_not_on_a_command_line_and_not_in_sparks_event_log(folder, monkeypatch):
    monkeypatch.setattr(service.secrets, "token_bytes", lambda size: SECRET[:size])
    forms = [SECRET, SECRET.hex().encode(), base64.b64encode(SECRET)]
    forms.append(b", ".join(str(byte).encode() for byte in SECRET))

    def train():
        lines = b""
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines += file.read_bytes()
            except OSError:
                continue
        parent = Path(f"/proc/{os.getppid()}/environ").read_bytes()
        own = base64.b64decode(os.environ["_HOROVOD_SECRET_KEY"])
        return own, [form in lines or form in parent for form in forms]

    assert run(train, num_proc=1)[0] == [(SECRET, [False] * len(forms))]
    data = spark_events = b""
    for file in (folder / "events").rglob("*"):
        if file.is_file():
            spark_events += file.read_bytes()
            data += file.name.encode()
    assert b"horoplug.spark.run(" in spark_events
    assert not [form for form in forms if form in spark_events + data]
    assert SECRET.decode() not in repr(tasks.Ticket("127.0.0.1", 1, SECRET, False, False))


def test_ctrl_c_ends_the_job(spark, tmp_path):
    def train():
        (tmp_path / str(os.getpid())).touch()
        while True:
            signal.pause()

    def interrupt():
        until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(train)
    thread.join()
    until(lambda: not active_jobs(spark))
    until(lambda: not any(Path("/proc", file.name).exists() for file in tmp_path.iterdir()))
    assert run(lambda: 1)[0] == [1, 1]


def test_used_slots_are_not_waited_for_without_end(spark, tmp_path):
    def occupy(_):
        (tmp_path / "here").touch()
        for _ in range(6000):
            if (tmp_path / "go").exists():
                return
            time.sleep(0.01)

    thread = threading.Thread(target=spark.sparkContext.parallelize([0], 1).foreach, args=(occupy,))
    thread.start()
    until((tmp_path / "here").exists, 60)
    try:
        with pytest.raises(RuntimeError, match=r"only 0 of 2 tasks have started in 1 s"):
            run(print, start_timeout=1)
        until(lambda: len(active_jobs(spark)) == 1)  # the one that uses a slot
    finally:
        (tmp_path / "go").touch()
        thread.join()


@pytest.mark.parametrize(
    ("function", "options", "kind", "text"),
    [
        (print, {"num_proc": 3}, ValueError, r"num_proc=3, but Spark runs only 2 tasks at once"),
        (print, {"num_proc": 0}, ValueError, "num_proc=0: at least 1"),
        (print, {"use_mpi": True}, ValueError, "use_mpi: Spark starts the ranks"),
        (
            print,
            {"nics": "nic9"},
            ValueError,
            "^nics='nic9' is wrong: there is no network interface nic9",
        ),
        (
            print,
            {"start_timeout": -1},
            ValueError,
            "^start_timeout=-1 is wrong: it must be a positive number",
        ),
        (
            print,
            {"start_timeout": "x"},
            ValueError,
            "^start_timeout='x' is wrong: it must be a positive number",
        ),
        (3, {}, TypeError, "wants a function, not 3"),
    ],
)
def test_a_wrong_argument_has_one_line(function, options, kind, text):
    with pytest.raises(kind, match=text) as caught:
        run(function, **options)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_pickled_has_one_line(spark):
    lock = threading.Lock()
    with pytest.raises(
        TypeError, match=r"cannot be pickled: the variable lock of .*lock"
    ) as caught:
        run(lambda: lock)
    assert "\n" not in str(caught.value)
    with pytest.raises(
        TypeError, match=r"cannot be pickled: the variable spark.*CONTEXT_ONLY_VALID_ON_DRIVER"
    ):
        run(lambda: spark.sparkContext)
    error = failure(lambda: threading.Lock(), num_proc=1)
    assert "the function's result, a _thread.lock, cannot be pickled" in str(error)


def test_a_barrier_task_that_is_lost_during_the_start_ends_the_job_and_another_one_is_awaited():
    class Service:
        events = queue.Queue()

    def wait(tasks_of_job):
        options = Options(start_timeout=0.1)
        job = BarrierJob(None, 2, b"", print, options, description="")
        task = service.Task(0, 7, tasks_of_job, "node3", True, "", None)
        for event in (service.Joined(task), service.Lost(task)):
            Service.events.put(event)
        job._wait_for_tasks(Service)

    with pytest.raises(
        RuntimeError, match="executor on node3 has ended before all tasks had started"
    ):
        wait(2)
    with pytest.raises(RuntimeError, match="only 0 of 2 tasks have started"):
        wait(0)


def test_the_reason_of_sparks_error_is_one_line():
    long = "An error occurred while calling o1.collect.\n: org.apache.spark.SparkException: Job aborted\nat x"
    assert reason(RuntimeError(long)) == "Job aborted"
    missing = RuntimeError("Job aborted\nModuleNotFoundError: No module named 'horoplug'\n")
    assert reason(missing).startswith("horoplug is not installed in the executors' Python")
    assert reason(KeyError()) == "KeyError"


def test_a_python_that_does_not_exist_is_reported():
    out, err = io.StringIO(), io.StringIO()
    with pytest.raises(horoplug.spark.RankError, match="rank 0 exited with code 127"):
        horoplug.spark.run(print, num_proc=1, executable="/no/python", stdout=out, stderr=err)
    assert err.getvalue() == "[0]<stderr>:/no/python cannot be started: No such file or directory\n"


@pytest.mark.short
def test_the_gpus_of_the_task_are_those_of_the_rank(monkeypatch):
    from pyspark import TaskContext
    from pyspark.resource import ResourceInformation

    class Context:
        def resources(self):
            return {"gpu": ResourceInformation("gpu", ["2", "3"])}

    monkeypatch.setattr(TaskContext, "get", Context)
    ticket = tasks.Ticket("127.0.0.1", 1, SECRET, False, False)
    monkeypatch.setenv(task.DEVICES, tasks._environment({}, ticket)[task.DEVICES])
    assert task.get_available_devices() == ["2", "3"]
    monkeypatch.delenv(task.DEVICES)
    assert task.get_available_devices() == []


def test_without_spark_or_a_session_one_line_says_what_to_do():
    code = "import horoplug.spark; horoplug.spark.run(print)"
    env = environment() | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=scaled(60)
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "ImportError: horoplug.spark needs pyspark: pip install 'horoplug[spark]'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert "there is no Spark session: create one" in done.stderr.splitlines()[-1]


def test_an_old_pyspark_is_one_line(monkeypatch):
    for version in ("3.4.1", "3.4.1-amzn-1"):
        monkeypatch.setattr("pyspark.__version__", version)
        with pytest.raises(ImportError, match=r"needs pyspark 3\.5 or later, and this is 3\.4\.1"):
            active_context()


@pytest.mark.parametrize(
    "version", ["3.5.0", "3.5rc1", "3.5.0-amzn-1", "3.5.0+amzn.1", "4.1.0.dev1"]
)
def test_versions_of_pyspark_in_all_their_forms(version, monkeypatch):
    monkeypatch.setattr("pyspark.__version__", version)
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", "a context")
    assert active_context() == "a context"
