"""Autotuning: all ranks agree on the tuned settings, the log lists them, and results keep their bits unless the user
requests the tuning of every setting."""

import csv

import numpy as np
import pytest

import horoplug as hvd
from horoplug.common.context import context

pytest_plugins = ["tests.harness.jobs"]

QUICK = {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}
MIB = 1024 * 1024


def train(steps):
    """Steps with 24 gradients of 512 KiB. Returns the last results as bytes and the counters."""
    rng = np.random.default_rng(hvd.rank())
    gradients = [rng.standard_normal(MIB // 8).astype(np.float32) for _ in range(24)]
    for _ in range(steps):
        handles = [
            hvd.allreduce_async(gradient, name=f"gradient {i}")
            for i, gradient in enumerate(gradients)
        ]
        results = [hvd.synchronize(handle) for handle in handles]
    return b"".join(result.tobytes() for result in results), context.engine().stats()


def trials(path):
    """The contents of the log: by setting, a dict from value to whether it was chosen."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        assert row["process_set"] == "0"
        assert float(row["median_step_ms"]) > 0
        assert row["steps"] == "2"
        found.setdefault(row["setting"], {})[int(row["value"])] = row["chosen"] == "1"
    for choices in found.values():
        assert sum(choices.values()) >= 1
    return found


def run(pool, hosts, steps, env):
    with pool.ranks(len(hosts), hosts=hosts, env={**QUICK, **env}) as job:
        results = job.run(train, steps)
    assert len({result for result, _ in results}) == 1
    return results[0]


def test_one_host_job_is_tuned_by_default(pool, tmp_path):
    log = tmp_path / "log.csv"
    tuned, counts = run(pool, "aa", 80, {"HOROVOD_AUTOTUNE_LOG": str(log)})
    assert counts["broken_plans"] >= 2
    found = trials(log)
    assert set(found) == {"bucket_bytes", "chunk_bytes"}
    assert found["bucket_bytes"].keys() >= {MIB, 2 * MIB, 4 * MIB, 8 * MIB}
    untuned, counts = run(pool, "aa", 10, {"HOROVOD_AUTOTUNE": "0"})
    assert counts["broken_plans"] == 0
    assert tuned == untuned


def test_job_across_hosts_tunes_only_settings_that_keep_results(pool, tmp_path):
    log = tmp_path / "log.csv"
    tuned, _ = run(pool, "aab", 40, {"HOROVOD_AUTOTUNE_LOG": str(log)})
    assert set(trials(log)) == {"chunk_bytes"}
    untuned, _ = run(pool, "aab", 10, {"HOROVOD_AUTOTUNE": "0"})
    assert tuned == untuned


def test_autotune_tunes_all_settings_not_set_by_the_user(pool, tmp_path):
    log = tmp_path / "log.csv"
    wanted = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "100",
    }
    run(pool, "aab", 180, wanted)
    assert set(trials(log)) == {"bucket_bytes", "chunk_bytes", "lanes", "latency_percent"}
    run(
        pool,
        "aab",
        80,
        {**wanted, "HOROPLUG_NUM_STREAMS": "2", "HOROPLUG_PLAN_BUCKET_SIZE": "1000000"},
    )
    assert set(trials(log)) == {"chunk_bytes", "latency_percent"}


def failed_init():
    with pytest.raises(ValueError, match="autotuner") as caught:
        hvd.init()
    return str(caught.value)


@pytest.mark.short(failure=True)
def test_unwritable_log_is_a_one_line_error(pool, tmp_path):
    path = tmp_path / "missing" / "log.csv"
    with pool.ranks(1, env={"HOROVOD_AUTOTUNE_LOG": str(path)}, init=False) as job:
        (message,) = job.run(failed_init)
    assert "HOROVOD_AUTOTUNE_LOG" in message
    assert message.endswith("No such file or directory")
    assert "\n" not in message
