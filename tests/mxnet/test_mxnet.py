"""MXNet 1.9 in the environment .venv-mxnet (requirements/mxnet.txt), which ``make environments`` creates."""

import os
import re
import subprocess

import pytest

from tests.harness import ROOT
from tests.harness.checks.errors import errors_of_survivors, internal
from tests.harness.limits import scaled
from tests.harness.support import Pool, environment, seed
from tests.harness.user_errors import ENVIRONMENT, check_texts, texts_of

PYTHON = ROOT / ".venv-mxnet" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="make environments makes .venv-mxnet")

DTYPES = ("float16", "float32", "float64", "uint8", "int8", "int32", "int64")


@pytest.fixture(scope="module")
def processes():
    pool = Pool(PYTHON)
    yield pool
    pool.close()


@pytest.fixture(scope="module", params=["aa", "aab"])
def ranks(request, processes):
    with processes.ranks(len(request.param), hosts=request.param) as job:
        yield job


def check(name, *arguments):
    """Call a check in a rank; this process has no MXNet."""
    from tests.harness.checks import mxnet_ops

    return getattr(mxnet_ops, name)(*arguments)


def same_on_all(results):
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.short("aa-*")
def test_operations(ranks, dtype):
    ranks.run(check, "check_operations", dtype, seed())


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.short("aa-*")
def test_rooted_and_point_to_point_operations(ranks, dtype):
    ranks.run(check, "check_rooted_and_point_to_point", dtype, seed())


@pytest.mark.short("aa")
def test_arguments_are_horovods(ranks):
    ranks.run(check, "check_horovods_arguments")


def test_shapes_and_classes_of_arrays(ranks):
    ranks.run(check, "check_shapes_and_classes")


def test_operations_are_ordered_with_the_engine(ranks):
    ranks.run(check, "check_order_with_the_engine", seed())


def test_refusals_are_one_line(ranks):
    ranks.run(check, "check_refusals")


def test_mistakes_are_one_line_in_the_words_of_the_framework(processes):
    with processes.ranks(2, init=False, env=ENVIRONMENT) as job:
        for texts in job.run(lambda: texts_of("mxnet")):
            check_texts("mxnet", texts)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-4),
        ({"num_groups": 2, "prefix": "a."}, 1e-4),
        ({"gradient_predivide_factor": 2.0}, 1e-4),
        ({"compression": "fp16"}, 5e-3),
        ({"compression": "bf16", "num_groups": 1}, 3e-2),
    ],
    ids=str,
)
@pytest.mark.short("aa-*")
def test_trainer(ranks, options, tolerance):
    same_on_all(ranks.run(check, "check_trainer", options, tolerance, seed()))


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.short("aa-*")
def test_optimizer(ranks, groups, as_list):
    ranks.run(check, "check_optimizer", seed(), groups, as_list)


@pytest.mark.short("aa")
def test_parameters_are_broadcast(ranks):
    same_on_all(ranks.run(check, "check_deferred_parameters", seed()))
    ranks.run(check, "check_parameters_of_modules")


@pytest.mark.short("aa")
def test_objects(ranks):
    ranks.run(check, "check_objects")


@pytest.mark.short
def test_process_sets(processes):
    with processes.ranks(3) as job:
        alone, *together = job.run(check, "check_process_sets", seed())
        same_on_all(together)
        assert alone != together[0]


def test_stub_is_up_to_date(processes):
    with processes.ranks(1) as job:
        job.run(check, "check_stub")


@pytest.mark.parametrize("hosts", ["aa", "aab"])
@pytest.mark.short(failure=True)
def test_killed_rank_is_named(processes, hosts):
    with processes.ranks(len(hosts), hosts=hosts) as job:
        outcomes = job.outcomes(check, "step_beside_a_killed_rank", 1, seed())
        errors_of_survivors(outcomes, 1)


def test_different_networks_are_named(processes):
    with processes.ranks(2) as job:
        internal(job.outcomes(check, "different_networks"), "allreduce", "rank 0", "rank 1")
        job.run(check, "check_objects")  # the job goes on


@pytest.mark.parametrize("hosts", ["aa", "aab"])
@pytest.mark.short(failure=True)
def test_state_returns_to_the_last_commit(processes, hosts):
    with processes.ranks(len(hosts), hosts=hosts) as job:
        same_on_all(job.run(check, "check_elastic", seed()))


def run(*command):
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=scaled(150),
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    not os.path.isdir("/usr/share/datasets/fashion-mnist"), reason="needs dataset-fashion-mnist"
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.short
def test_example_learns(size):
    program = ROOT / "examples" / "mxnet" / "train.py"
    said = run(
        *(PYTHON, "-m", "horoplug.runner", "-np", size, PYTHON, program),
        *("--max-samples", 6000, "--epochs", 2),
    )
    (last,) = re.findall(r"epoch 2/2: loss [\d.]+, test accuracy ([\d.]+)%", said)
    assert float(last) > 70


def test_program_for_horovod_runs_unchanged(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("""
import mxnet as mx
import horovod.mxnet as hvd
from horovod.mxnet.mpi_ops import allreduce, size
from horoplug.compat import attributes, surface

for module in ("horovod.mxnet", "horovod.mxnet.compression", "horovod.mxnet.functions", "horovod.mxnet.mpi_ops"):
    loaded = __import__(module, fromlist=["x"])
    for name in {*surface.OWN[module].split()} - {*attributes.lacking_in(module)}:
        getattr(loaded, name)
hvd.init()
total = allreduce(mx.nd.ones(2) * hvd.rank(), average=False, name="x", priority=0)
assert total.asnumpy().tolist() == [1, 1], total
print("ranks", size())
""")
    said = run(PYTHON, "-m", "horoplug.runner", "--compat", "-np", 2, PYTHON, program)
    assert said.count("ranks 2") == 2
