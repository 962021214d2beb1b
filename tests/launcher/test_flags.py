"""The command-line flags, and the configuration file that sets the same options."""

import re

import pytest

from horoplug.base.config import VARIABLES
from horoplug.base.variables import IGNORED
from horoplug.runner import launch
from horoplug.runner.command import config_file
from horoplug.runner.command.arguments import parse
from horoplug.runner.command.flags import all_flags
from horoplug.runner.mpi.mpirun_launch import environment
from tests.harness import ROOT

# The flags in the documentation of Horovod 0.28.1.
HOROVOD = """
-v --version -np --num-proc -cb --check-build --start-timeout --output-filename --verbose --config-file
--fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce
--hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce
--autotune --no-autotune --autotune-log-file --autotune-warmup-samples --autotune-steps-per-sample
--autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc
--slots-per-host --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename
--timeline-mark-cycles --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
--stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
--num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp --log-without-timestamp
-prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp --no-log-hide-timestamp -H --hosts
--host-discovery-script --gloo --mpi --jsrun -hostfile --hostfile -p --ssh-port -i --ssh-identity-file --disable-cache
--network-interface --network-interfaces
"""


@pytest.mark.short
def test_every_horovodrun_flag_exists():
    ours = {name for flag in all_flags() for name in flag.names.split()}
    ours |= {name for flag in all_flags() for form in flag.forms for name in form.names.split()}
    assert not set(HOROVOD.split()) - ours


def test_guide_documents_every_flag_and_config_key():
    page = (ROOT / "docs" / "horovodrun.md").read_text()
    forms = [form.names for flag in all_flags() for form in flag.forms]
    names = {name for text in [flag.names for flag in all_flags()] + forms for name in text.split()}
    assert not [name for name in names - {"--controller"} if not re.search(rf"`{name}\b", page)]
    yaml = pytest.importorskip("yaml")
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = config_file.settings(yaml.safe_load(example))
    assert set(found) == {flag.attribute for flag in all_flags() if flag.config}


def test_flags_set_variables_that_are_read():
    known = {variable.name for variable in VARIABLES} | {*IGNORED, "STALL_CHECK_DISABLE"}
    assert {flag.variable for flag in all_flags() if flag.variable} <= known
    attributes = [flag.attribute for flag in all_flags()]
    assert len(set(attributes)) == len(attributes)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--autotune", {"AUTOTUNE": "1"}),
        ("--no-autotune", {"AUTOTUNE": "0"}),
        ("--stall-check", {"STALL_CHECK_DISABLE": "0"}),
        ("--log-with-timestamp", {"LOG_HIDE_TIME": "0"}),
        ("--log-hide-timestamp", {"LOG_HIDE_TIME": "1"}),
        ("--cycle-time-ms 2.5", {"CYCLE_TIME": "2.5"}),
        ("--torus-allreduce", {"TORUS_ALLREDUCE": "1"}),
        ("--no-hierarchical-allgather", {"HIERARCHICAL_ALLGATHER": "0"}),
        ("--thread-affinity 3", {"THREAD_AFFINITY": "3"}),
        ("--thread-affinity 0,1", {"THREAD_AFFINITY": "0,1"}),
        ("--mpi-threads-disable", {"MPI_THREADS_DISABLE": "1"}),
        ("--num-nccl-streams 2", {"NUM_NCCL_STREAMS": "2"}),
        ("--log-level debug", {"LOG_LEVEL": "debug"}),
        ("--as-gloo", {"AS_GLOO": "1"}),
        ("", {}),
    ],
)
@pytest.mark.short
def test_flags_become_settings(flags, settings):
    assert parse(["-np", "1", *flags.split(), "prog"]).settings == settings


def test_flags_set_variables_outside_of_horovod():
    assert parse(["-np", "1", "prog"]).variables == {}
    flags = ["--tcp", "--network-interface", "eth0", "--network-interfaces", "ib0,ib1"]
    options = parse(["-np", "1", *flags, "prog"])
    assert options.variables == {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0,ib0,ib1"}
    env = environment(options, {"HOROPLUG_GLOO_IFACE": "old", "HOROVOD_RANK": "3", "KEPT": "1"})
    assert env["HOROVOD_GLOO_IFACE"] == "eth0,ib0,ib1"
    assert env["KEPT"] == "1"
    assert not {"HOROPLUG_GLOO_IFACE", "HOROVOD_RANK"} & set(env)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--min-np 0", "at least 1 is wanted, not 0"),
        ("--elastic-timeout 0", "a positive number of seconds is wanted"),
        ("--blacklist-cooldown-range 10 x", "a whole number is wanted, not 'x'"),
        ("--blacklist-cooldown-range 10 --", "expected 2 arguments"),
        ("--gloo --mpi", "not allowed with argument --gloo"),
        ("--thread-affinity first", "CPU numbers separated by commas are wanted, not 'first'"),
        ("--autotune-gaussian-process-noise 2", "a not negative number up to 1 is wanted"),
        ("--cycle-time-ms -1", "a not negative number of milliseconds is wanted, not '-1'"),
        ("--config-file nonesuch.yaml", "nonesuch.yaml cannot be read: No such file"),
    ],
)
@pytest.mark.short(failure=True)
def test_invalid_flags_are_refused_in_one_line(arguments, message, capsys):
    if "--config-file" in arguments:
        pytest.importorskip("yaml")
    assert launch.main(["-np", "2", *arguments.split(), "true"]) == 2
    assert re.fullmatch(r"horovodrun: [^\n]+\n", error := capsys.readouterr().err)
    assert message in error


# ---- configuration file ----------------------------------------------------------------------------------------------

EVERYTHING = """
controller: mpi
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 5
  cache_capacity: 2048
  hierarchical_allreduce: true
  thread_share: false
  hierarchical_allgather: false
  torus_allreduce: true
autotune:
  enabled: true
  log_file: log.csv
  warmup_samples: 5
  steps_per_sample: 20
  bayes_opt_max_samples: 50
  gaussian_process_noise: 0.9
timeline:
  filename: timeline.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 120
  shutdown_time_seconds: 240
library_options:
  mpi_threads_disable: true
  num_nccl_streams: 2
  thread_affinity: 1
  gloo_timeout_seconds: 60
logging:
  level: INFO
  with_timestamp: false
elastic:
  min_np: 2
  max_np: 8
  host_discovery_script: ./hosts
  slots_per_host: 4
  timeout: 30
  reset_limit: 5
  replace_slow: 3
"""


@pytest.fixture
def file(tmp_path):
    pytest.importorskip("yaml")

    def write(text):
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.short
def test_config_file_with_every_key(file):
    options = parse(["-np", "2", "--config-file", str(file(EVERYTHING)), "prog"])
    assert options.controller == "mpi"
    assert options.settings == {
        "FUSION_THRESHOLD": str(32 << 20),
        "CYCLE_TIME": "5",
        "CACHE_CAPACITY": "2048",
        "HIERARCHICAL_ALLREDUCE": "1",
        "THREAD_SHARE": "0",
        "HIERARCHICAL_ALLGATHER": "0",
        "TORUS_ALLREDUCE": "1",
        "AUTOTUNE": "1",
        "AUTOTUNE_LOG": "log.csv",
        "AUTOTUNE_WARMUP_SAMPLES": "5",
        "AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
        "AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9",
        "TIMELINE": "timeline.json",
        "TIMELINE_MARK_CYCLES": "1",
        "STALL_CHECK_DISABLE": "1",
        "STALL_CHECK_TIME_SECONDS": "120",
        "STALL_SHUTDOWN_TIME_SECONDS": "240",
        "MPI_THREADS_DISABLE": "1",
        "NUM_NCCL_STREAMS": "2",
        "THREAD_AFFINITY": "1",
        "GLOO_TIMEOUT_SECONDS": "60",
        "LOG_LEVEL": "info",
        "LOG_HIDE_TIME": "1",
        "ELASTIC_TIMEOUT": "30",
    }
    others = (
        options.controller,
        options.min_num_proc,
        options.max_num_proc,
        options.host_discovery_script,
        options.slots_per_host,
        options.reset_limit,
        options.replace_slow,
    )
    assert others == ("mpi", 2, 8, "./hosts", 4, 5, "3")
    configurable = {flag.config for flag in all_flags() if flag.config}
    assert len(options.settings) + len(others) == len(configurable), "the file above has everything"


def test_command_line_overrides_config_file(file):
    path = file("params: {cache_capacity: 1}\nautotune: {enabled: true}\ncontroller: mpi\n")
    flags = ["--no-autotune", "--config-file", str(path), "--cache-capacity", "2", "--gloo"]
    options = parse(["-np", "2", *flags, "prog"])
    assert options.settings == {"CACHE_CAPACITY": "2", "AUTOTUNE": "0"}
    assert options.controller == "gloo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {fusion_threshold_mb: much}", "params.fusion_threshold_mb: a whole number is wanted, not 'much'"),
        ("params: {fusion_threshold_mb: true}", "params.fusion_threshold_mb: a whole number is wanted, not True"),
        ("params: {fusion_threshold_mb: -1}", "params.fusion_threshold_mb: at least 0 is wanted, not -1"),
        ("params: {fusion: 1}", "there is no params.fusion; params has cache_capacity, cycle_time_ms"),
        ("parameters: {fusion_threshold_mb: 1}", "there is no section 'parameters'; there are autotune, controller"),
        ("params: 3", "params: settings are wanted, not 3"),
        ("- params", "sections are wanted"),
        ("autotune: {enabled: 1}", "autotune.enabled: true or false is wanted, not 1"),
        ("autotune: {log_file: 1}", "autotune.log_file: a text is wanted, not 1"),
        ("stall_check: {warning_time_seconds: soon}", "a whole number or a number is wanted, not 'soon'"),
        ("logging: {level: LOUD}", "logging.level: one of DEBUG, ERROR"),
        ("controller: carrier-pigeon", "controller: one of gloo, jsrun, mpi is wanted"),
        ("controller: [gloo", ":1 is not YAML: "),
        ("\x01", "is not YAML: "),
    ],
)  # fmt: skip
def test_invalid_config_file_is_refused(file, text, message, capsys):
    assert launch.main(["-np", "2", "--config-file", str(file(text)), "true"]) == 2
    assert re.fullmatch(r"horovodrun: [^\n]*job\.yaml[^\n]+\n", error := capsys.readouterr().err)
    assert message in error


def test_empty_config_file_sections_set_nothing():
    assert config_file.settings({}) == {}
    assert config_file.settings({"params": None, "autotune": {"log_file": None}}) == {}
