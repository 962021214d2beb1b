"""Lightning's Trainer and Fabric: on the backend of torch.distributed, and with HorovodStrategy."""

import json
import signal
import sys
from types import SimpleNamespace

import pytest

import horoplug.torch as hvd
from horoplug.common.notice import Notice
from tests.harness.integrations import runs
from tests.harness.support import seed

SLURMEnvironment = pytest.importorskip("lightning.fabric.plugins.environments").SLURMEnvironment

PROGRAM = runs.FOLDER / "lightning_training.py"


@pytest.fixture(scope="module")
def key():
    return seed() % 10_000


@pytest.fixture
def train(tmp_path, key):
    """A function that trains on two ranks and returns what they end with."""

    def run(strategy, **options):
        folder = runs.empty(tmp_path / strategy.replace(" ", "-"))
        options |= {"strategy": strategy, "seed": key}
        # Lightning's DDP and Fabric start the other process themselves.
        own = strategy in ("gloo", "horoplug") or strategy.startswith("fabric on")
        variables = {"HOROPLUG_AS_GLOO": "1"} if strategy == "fabric on horoplug" else {}
        start = [sys.executable] if own else runs.horovodrun()
        runs.run([*start, PROGRAM, folder, json.dumps(options)], variables)
        found = runs.results(folder)
        assert [each["world"] for each in found] == [2, 2]
        return found

    return run


OPTIONS = {
    "plain": {},
    "accumulation, clipping": {"trainer": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}},
    "manual, two optimizers": {"manual": True},
    "bfloat16": {"trainer": {"precision": "bf16-mixed"}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_trainer(train, options):
    """All three train to the same parameters and metrics."""
    gloo, _ = train("gloo", **options)
    for name, more in (("horoplug", {}), ("instance", {"arguments": {"scale_lr": False}})):
        mine, other = train(name, **options, **more)
        tolerance = 2e-3 if "bf16" in str(options) else 1e-5
        runs.assert_close(gloo, mine, tolerance)
        assert mine["metrics"] == other["metrics"]
        assert mine["rates"] == gloo["rates"]
        # The statistics of BatchNorm, which validation uses, are those of rank 0 with DDP only.
        names = gloo["metrics"] if name == "horoplug" else ["loss"]
        for metric in names:
            assert mine["metrics"][metric] == pytest.approx(
                gloo["metrics"][metric], rel=100 * tolerance
            )


def test_strategy_by_name_scales_the_learning_rate(train):
    by_name, _ = train("by name", rate=0.01)
    by_hand, _ = train("instance", rate=0.02, arguments={"scale_lr": False})
    assert by_name["rates"] == [0.02, 0.01]
    runs.assert_close(by_name, by_hand)


def test_strategy_trains_twice_and_continues_from_a_checkpoint(train):
    once, _ = train("instance", epochs=3)
    again, _ = train("instance", epochs=2, again=True)
    assert again["rates"][:2] == once["rates"][:2]
    half, _ = train("by name", epochs=2)
    resumed, _ = train("instance", epochs=3, resume=half["checkpoint"])
    assert resumed["rates"] == once["rates"][2:]
    runs.assert_close(once, resumed)


def test_strategy_with_synchronised_batch_norm(train):
    gloo, _ = train("gloo", trainer={"sync_batchnorm": False})
    mine, _ = train("instance", trainer={"sync_batchnorm": True}, arguments={"scale_lr": False})
    assert mine["rates"] == gloo["rates"]
    assert any(
        not value.equal(gloo["parameters"][name]) for name, value in mine["parameters"].items()
    )


def test_fabric(train):
    on_gloo, _ = train("fabric on gloo")
    for name in ("fabric on horoplug", "fabric"):
        mine, _ = train(name)
        runs.assert_close(on_gloo, mine)


# ---- signals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def connector(monkeypatch):
    """A function that makes Lightning's owner of the signal handlers, in a job of Slurm or of horovodrun."""
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    made, saved = [], []

    def make(environment):
        owner = SimpleNamespace(cluster_environment=environment)
        trainer = SimpleNamespace(
            _accelerator_connector=owner,
            loggers=[],
            default_root_dir=".",
            is_global_zero=False,
            save_checkpoint=saved.append,
            _checkpoint_connector=SimpleNamespace(hpc_save_path=lambda folder: "hpc.ckpt"),
        )
        made.append(_SignalConnector(trainer))
        made[-1].register_signal_handlers()
        return made[-1], saved

    yield make
    for each in made:
        each.teardown()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_lightning_leaves_a_signal_to_elastic_jobs(connector):
    """The notice of an elastic job is watched when Lightning registers its handlers: Lightning does not requeue."""
    notice = Notice()
    notice.watch(signal.SIGUSR1, None)
    handlers, saved = connector(SLURMEnvironment())
    signal.raise_signal(signal.SIGUSR1)
    assert notice.is_given()
    assert saved == []
    handlers.teardown()
    assert signal.getsignal(signal.SIGUSR1) == notice._on_signal


def test_an_elastic_job_that_begins_later_calls_lightnings_handler(connector):
    _, saved = connector(SLURMEnvironment())
    notice = Notice()
    notice.watch(signal.SIGUSR1, None)
    signal.raise_signal(signal.SIGUSR1)
    assert notice.is_given()
    assert saved == ["hpc.ckpt"]


def test_horovod_strategy_does_not_requeue(connector):
    """The signal stays with the program, also in a job of Slurm."""
    from horoplug.lightning import HorovodEnvironment

    try:
        _, saved = connector(HorovodEnvironment())
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
        assert saved == []
    finally:
        hvd.shutdown()
