"""The order in which ``pytest -n`` runs the tests (tests/harness/scheduling.py), with simulated workers."""

import random
from types import SimpleNamespace

import pytest

from tests.harness import ROOT
from tests.harness.support import seed

scheduling = pytest.importorskip("tests.harness.scheduling", reason="needs pytest-xdist")


class Config:
    def __init__(self, workers):
        self.workers = workers

    def getvalue(self, name):
        assert name == "tx"
        return ["popen"] * self.workers


class Worker:
    """A worker, which starts a test when it has been assigned the next one or is told that there is none."""

    def __init__(self):
        self.gateway = SimpleNamespace(id="worker")
        self.queue = []
        self.shutting_down = False
        self.finished = False

    def send_runtest_some(self, indices):
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self):
        self.shutting_down = True

    def next_test(self):
        """The index of the test that this worker can run; None if it has to wait."""
        return self.queue[0] if len(self.queue) > self.shutting_down ^ 1 else None


def run(tests, workers, key):
    """Run all tests, with workers in random order. Returns (worker, test) in the order of completion."""
    draw = random.Random(key)
    schedule = scheduling.Scheduling(Config(workers))
    nodes = [Worker() for _ in range(workers)]
    for node in nodes:
        schedule.add_node(node)
    for node in nodes:
        schedule.add_node_collection(node, tests)
    schedule.schedule()
    ended = []
    while not all(node.finished for node in nodes):
        if schedule.tests_finished:
            for node in nodes:
                node.shutdown()
        able = [n for n in nodes if n.next_test() is not None]
        over = [n for n in nodes if n.shutting_down and not n.queue and not n.finished]
        assert able or over, "every worker waits"
        node = draw.choice(able + over)
        if node in over:
            node.finished = True
            assert schedule.remove_node(node) is None
            continue
        index = node.queue.pop(0)
        ended.append((nodes.index(node), tests[index]))
        schedule.mark_test_complete(node, index)
    return ended


def made_up(draw):
    """Test ids in some files of each kind."""
    files = [
        *scheduling.ALONE,
        "tests/mpi/test_mpirun.py",
        "tests/gpu/test_mpi.py",
        *scheduling.GROUPS["hosts"],
        *scheduling.SPLIT,
    ]
    files += [f"tests/core/test_{n}.py" for n in range(5)]
    files = draw.sample(files, draw.randint(1, len(files)))
    return [f"{file}::test[{n}]" for file in files for n in range(draw.choice([1, 1, 2, 9]))]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_test_runs_once_and_exclusive_files_run_alone(workers):
    draw = random.Random(seed())
    for _ in range(200):
        tests = made_up(draw)
        ended = run(tests, workers, draw.random())
        assert sorted(test for _, test in ended) == sorted(tests)
        groups = [scheduling.group_of(test) for _, test in ended]
        alone = [group in scheduling.ALONE for group in groups]
        assert alone == sorted(alone), (
            "one that must be alone has begun before the others were done"
        )
        assert len({worker for (worker, _), each in zip(ended, alone, strict=True) if each}) <= 1
        for group in set(groups):
            assert (
                len({w for (w, _), each in zip(ended, groups, strict=True) if each == group}) == 1
            )


def test_scheduled_files_exist():
    grouped = [file for files in scheduling.GROUPS.values() for file in files]
    for file in [*scheduling.ALONE, *grouped, *scheduling.SPLIT]:
        assert (ROOT / file).exists(), file


def test_files_of_a_group_go_to_one_worker_and_other_files_to_any():
    for name, files in scheduling.GROUPS.items():
        for file in files:
            example = f"{file}test_any.py" if file.endswith("/") else file
            assert scheduling.group_of(f"{example}::test_a[1]") == name
    assert scheduling.group_of("tests/core/test_join.py::test_a") == "tests/core/test_join.py"


def test_leftovers_test_runs_last():
    assert list(scheduling.ALONE)[-1].endswith("test_leftovers.py")
