"""Environment variables: defaults, precedence, one-line errors, and jobs that only variables describe."""

import base64
import logging
import re

import pytest

from horoplug.base import config, log
from horoplug.base.config import VARIABLES, Config
from horoplug.base.variables import IGNORED
from horoplug.common.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    HostsUpdatedInterrupt,
    NotInitializedError,
)
from horoplug.rendezvous.session import Rendezvous


@pytest.mark.short
def test_defaults_and_empty_values():
    assert Config.from_env({}) == Config()
    assert Config.from_env({name: " " for v in VARIABLES for name in v.names}) == Config()


@pytest.mark.short
def test_horoplug_variables_override_horovod_variables():
    env = {"HOROVOD_FUSION_THRESHOLD": "1", "HOROPLUG_FUSION_THRESHOLD": "2"}
    assert Config.from_env(env).fusion_threshold == 2
    assert Config.from_env({"HOROVOD_FUSION_THRESHOLD": "1"}).fusion_threshold == 1
    assert Config.from_env({"HOROVOD_HOSTNAME": "a", "HOROPLUG_HOST_KEY": "b"}).hostname == "b"
    assert Config.from_env({"HOROVOD_HOSTNAME": "a"}).hostname == "a"


@pytest.mark.parametrize(
    ("variable", "value", "field", "expected"),
    [
        ("FUSION_THRESHOLD", "0", "fusion_threshold", 0),
        ("CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("STALL_CHECK_DISABLE", "1", "stall_check_time", 0.0),
        ("STALL_CHECK_TIME_SECONDS", "2.5", "stall_check_time", 2.5),
        ("STALL_SHUTDOWN_TIME_SECONDS", "90", "stall_shutdown_time", 90.0),
        ("OPERATION_TIMEOUT_SECONDS", "0", "operation_timeout", 0.0),
        ("OPERATION_TIMEOUT_SECONDS", "-1", "operation_timeout", 0.0),
        ("PLAN_AFTER_STEPS", "0", "plan_after", 0),
        ("DEADLOCK_TIME_SECONDS", "1", "deadlock_time", 1.0),
        ("LOG_LEVEL", "DEBUG", "log_level", "debug"),
        ("LOG_HIDE_TIME", "true", "log_hide_time", True),
        ("THREAD_AFFINITY", "3,1", "thread_affinity", (3, 1)),
        ("ALGORITHM", "ring", "algorithm", "ring"),
        ("RENDEZVOUS_SERVER", "rank0", "rendezvous_server", "rank0"),
        ("DYNAMIC_PROCESS_SETS", "1", "dynamic_process_sets", True),
        ("ELASTIC", "1", "elastic", True),
        ("MPI_CUDA", "0", "mpi_cuda", False),
        ("TIMELINE", "/tmp/trace.json", "timeline", "/tmp/trace.json"),
        ("TIMELINE_MARK_CYCLES", "1", "timeline_mark_cycles", True),
    ],
)
@pytest.mark.short
def test_variables_are_parsed(variable, value, field, expected):
    assert getattr(Config.from_env({f"HOROVOD_{variable}": value}), field) == expected


@pytest.mark.short
def test_single_variable_is_read_alone(monkeypatch):
    monkeypatch.delenv("HOROPLUG_ELASTIC", raising=False)
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    assert config.value("ELASTIC") is True
    monkeypatch.setenv("HOROPLUG_ELASTIC", "0")
    assert config.value("ELASTIC") is False
    monkeypatch.setenv("HOROVOD_SIZE", "wrong")  # not read
    assert config.value("RANK") == 0
    with pytest.raises(ValueError, match="HOROVOD_SIZE='wrong' is wrong"):
        config.value("SIZE")


# Horovod's variables that affect a running job with any framework and launcher.
HOROVOD = """
    ADASUM_MPI_CHUNK_SIZE AUTOTUNE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE AUTOTUNE_LOG
    AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_WARMUP_SAMPLES BATCH_D2D_MEMCOPIES CACHE_CAPACITY CCL_CACHE CONTROLLER
    CPU_OPERATIONS CROSS_RANK CROSS_SIZE CYCLE_TIME DISABLE_GROUP_FUSION DISABLE_NVTX_RANGES DYNAMIC_PROCESS_SETS
    ELASTIC ELASTIC_TIMEOUT ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS FUSION_THRESHOLD GLOO_IFACE GLOO_RENDEZVOUS_ADDR
    GLOO_RENDEZVOUS_PORT GLOO_TIMEOUT_SECONDS HIERARCHICAL_ALLGATHER HIERARCHICAL_ALLREDUCE HOSTNAME LOCAL_RANK
    LOCAL_SIZE LOG_HIDE_TIME LOG_LEVEL MPI_THREADS_DISABLE NUM_NCCL_STREAMS RANK SIZE STALL_CHECK_DISABLE
    STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS START_TIMEOUT THREAD_AFFINITY TORUS_ALLREDUCE
"""


@pytest.mark.short
def test_every_variable_of_horovod_is_known():
    read = {name for variable in VARIABLES for name in variable.names}
    ignored = {f"HOROVOD_{name}" for name in IGNORED}
    assert {f"HOROVOD_{name}" for name in HOROVOD.split()} <= read | ignored
    assert not read & ignored


@pytest.mark.short
def test_autotune_variables():
    def tuning(env):
        return [value for name, value in Config.from_env(env).core.items() if "autotune" in name]

    assert tuning({}) == [None, None, 3, 10, 20]
    samples = {
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "6",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "7",
        "HOROVOD_AUTOTUNE_LOG": "tuning.csv",
    }
    assert tuning(samples | {"HOROVOD_AUTOTUNE": "0"}) == [False, "tuning.csv", 5, 6, 7]
    assert tuning(samples | {"HOROVOD_AUTOTUNE": "1"}) == [True, "tuning.csv", 5, 6, 7]
    assert Config.from_env({"HOROVOD_AUTOTUNE": "1"}).num_streams == 4
    # A setting with its own variable is not tuned.
    fixed = {
        "HOROVOD_AUTOTUNE": "1",
        "HOROPLUG_NUM_STREAMS": "3",
        "HOROPLUG_PLAN_BUCKET_SIZE": "100000",
    }
    assert Config.from_env(fixed).num_streams == 3
    assert set(Config.from_env(fixed).autotune_fixed) == {"NUM_STREAMS", "PLAN_BUCKET_SIZE"}


@pytest.mark.short
def test_secret_key_variables():
    secret = bytes(range(32))
    for text in (secret.hex(), base64.b64encode(secret).decode()):
        for name in ("_HOROVOD_SECRET_KEY", "HOROPLUG_SECRET_KEY"):
            config = Config.from_env({name: text})
            assert config.secret_key == secret
            assert text not in repr(config)
            assert repr(secret) not in repr(config)
    for wrong in ("00" * 31, "zz" * 32, "hello", secret.hex() + "00"):
        with pytest.raises(ValueError, match=r"HOROPLUG_SECRET_KEY=.* 32 bytes as hex") as caught:
            Config.from_env({"HOROPLUG_SECRET_KEY": wrong})
        assert wrong not in str(caught.value)


@pytest.mark.short
def test_secret_file(tmp_path):
    """It has the job's secret instead of the environment, which launchers pass on in plain text."""
    file, secret = tmp_path / "secret", bytes(range(32))
    env = {"HOROPLUG_SECRET_FILE": str(file)}
    with pytest.raises(ValueError, match=rf"\AHOROPLUG_SECRET_FILE={file}: No such file[^\n]*\Z"):
        Config.from_env(env)
    file.touch(0o600)
    file.write_text(secret.hex() + "\n")
    assert Config.from_env(env).secret_key == secret
    assert Config.from_env(env | {"HOROPLUG_SECRET_KEY": "ff" * 32}).secret_key == b"\xff" * 32
    file.chmod(0o640)
    with pytest.raises(ValueError, match=r"\A[^\n]*can be read or changed by other users[^\n]*\Z"):
        Config.from_env(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HOROVOD_RANK": "x"}, "HOROVOD_RANK='x' is wrong: it must be a whole number from 0"),
        ({"HOROPLUG_SIZE": "0"}, "HOROPLUG_SIZE='0' is wrong"),
        (
            {"HOROVOD_RANK": "2", "HOROVOD_SIZE": "2"},
            "HOROVOD_RANK=2 is wrong: with HOROVOD_SIZE=2",
        ),
        ({"HOROVOD_LOCAL_RANK": "1"}, "HOROVOD_LOCAL_RANK=1 is wrong"),
        ({"HOROVOD_FUSION_THRESHOLD": "64MB"}, "HOROVOD_FUSION_THRESHOLD='64MB' is wrong"),
        ({"HOROVOD_LOG_LEVEL": "loud"}, "trace, debug, info, warning, error, fatal"),
        ({"HOROVOD_GLOO_TIMEOUT_SECONDS": "nan"}, "a positive number of seconds"),
        ({"HOROVOD_START_TIMEOUT": "-3"}, "a positive number of seconds"),
        ({"HOROVOD_STALL_CHECK_DISABLE": "2"}, "0 or 1"),
        ({"HOROPLUG_MPI_CUDA": "auto"}, "HOROPLUG_MPI_CUDA='auto' is wrong: it must be 0 or 1"),
        ({"HOROVOD_GLOO_RENDEZVOUS_PORT": "70000"}, "a whole number from 1 to 65535"),
        ({"HOROVOD_THREAD_AFFINITY": "1;2"}, "CPU numbers separated by commas"),
    ],
)
@pytest.mark.short
def test_invalid_values_are_refused(env, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Config.from_env(env)
    assert "\n" not in str(caught.value)


@pytest.mark.short
def test_unsupported_variables_are_reported_in_one_line(caplog):
    env = {f"HOROVOD_{name}": "1" for name in IGNORED}
    config = Config.from_env(env)
    logger = logging.getLogger("test")
    with caplog.at_level(logging.INFO, "test"):
        config.log_notes(logger)
    assert len(caplog.records) == 1
    assert all(name in caplog.text for name in env)
    # Variables that the launcher sets for all ranks are not reported.
    quiet = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    assert Config.from_env(quiet).notes == ()


@pytest.mark.short
def test_stall_shutdown_before_the_warning_is_ignored():
    config = Config.from_env({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"})
    assert config.stall_shutdown_time == 0
    assert config.notes[0][0] == logging.WARNING


@pytest.mark.short
def test_log_configuration(capsys):
    logger = logging.getLogger("horoplug")
    before = logger.handlers, logger.level, logger.propagate
    try:
        log.configure("info", hide_time=True, rank=3)
        log.configure("info", hide_time=True, rank=3)
        logger.info("one %s", "line")
        log.from_core(4, "100 % from the core")
        log.from_core(1, "hidden")
        assert capsys.readouterr().err == (
            "[I horoplug] [3]: one line\n[E horoplug] [3]: 100 % from the core\n"
        )
        log.configure("trace")
        log.from_core(0, "traced")
        assert re.fullmatch(
            r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: T horoplug\]: traced\n",
            capsys.readouterr().err,
        )
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


@pytest.mark.short
def test_error_classes_and_texts():
    assert issubclass(HorovodInternalError, RuntimeError)
    assert HostsUpdatedInterrupt(True).skip_sync
    assert not HostsUpdatedInterrupt().skip_sync
    assert issubclass(HorovodVersionMismatchError, ImportError)
    assert issubclass(NotInitializedError, ValueError)
    assert str(NotInitializedError()) == "Horovod has not been initialized; use hvd.init()"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({}, "HOROVOD_GLOO_RENDEZVOUS_ADDR"),
        (
            {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1"},
            "SECRET_KEY",
        ),
    ],
)
@pytest.mark.short
def test_job_without_a_launcher_names_missing_variables(env, message):
    with pytest.raises(ValueError, match=message) as caught:
        Rendezvous(Config.from_env({"HOROVOD_SIZE": "2", **env}))
    assert "\n" not in str(caught.value)


@pytest.mark.short
def test_single_process_needs_no_launcher():
    with Rendezvous(Config.from_env({})) as rendezvous:
        assert rendezvous.connect(0).size == 1
