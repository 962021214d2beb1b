"""The benchmarks run, verify their results, and write complete records and reports."""

import functools
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.harness import OPTIONAL, ROOT, simulated_gpu

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

import control_plane  # noqa: E402
import gpu  # noqa: E402
import raw  # noqa: E402
import suite  # noqa: E402
import summary  # noqa: E402
from harness import gpu_results, machine, models, mpi  # noqa: E402

from tests.gpu.device import results as seen  # noqa: E402
from tests.harness.limits import scaled  # noqa: E402

BINARY = ROOT / "build" / "release" / "bin" / control_plane.BINARY
needs_binary = pytest.mark.skipif(not BINARY.exists(), reason="make cpp-release builds it")


def run(program, *options, status=0):
    """Run a benchmark and return its output."""
    command = [sys.executable, str(BENCHMARKS / f"{program}.py"), *map(str, options)]
    env = os.environ | {"PYTHONPATH": str(OPTIONAL)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def record(path):
    """Read a record and check its format."""
    found = json.loads(path.read_text())
    assert found["format"] == 1
    assert found["rows"]
    assert found["wrong"] == 0
    assert found["command"].startswith(f"python benchmarks/{found['benchmark']}.py ")
    assert found["machine"].keys() >= {"processor", "cores", "memory", "kernel", "horoplug"}
    assert found["load"].keys() == {"before", "after"}
    # Before and after, and between the rows of a sweep.
    has_program = machine.ROUND_TRIP.exists() and len(os.sched_getaffinity(0)) > 1
    assert len(found["round_trips"]) >= 2 * has_program
    assert all(1 < trip < 1e6 for trip in found["round_trips"])
    for row in found["rows"]:
        assert row.keys() == found["columns"].keys()
    for plot in found["plots"]:
        assert {plot["x"], plot["y"], plot["line"]} <= row.keys()
    return found


# ---- allreduce.py ----------------------------------------------------------------------------------------------------


def sweep(tmp_path, *options):
    """The rows of a small sweep on two ranks, and the printed text."""
    table = tmp_path / "table.json"
    shape = ("-np", 2, "-n", 5, "-b", 8, "-e", "8K", "-f", 8)
    text = run("allreduce", *shape, "--json", table, *options)
    return record(table)["rows"], text


@pytest.mark.parametrize(
    ("collective", "bus_factor"),
    [
        ("allreduce", 1),
        ("allgather", 0.5),
        ("broadcast", 1),
        ("alltoall", 0.5),
        ("reducescatter", 0.5),
    ],
)
def test_sweep_of_collectives(tmp_path, collective, bus_factor):
    pytest.importorskip("torch")
    rows, text = sweep(tmp_path, "--collective", collective, "--peer", "torch-gloo")
    assert [row["size"] for row in rows] == [8, 8, 64, 64, 512, 512, 4096, 4096]
    assert [row["library"] for row in rows] == ["horoplug", "torch-gloo"] * 4
    for row, own in zip(rows, [row for row in rows[::2] for _ in range(2)], strict=True):
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * bus_factor)
        assert row["ratio"] == pytest.approx(row["time"] / own["time"])
    assert "# wrong results: 0" in text
    assert "# torch-gloo takes" in text


def test_barrier_is_measured_once(tmp_path):
    pytest.importorskip("torch")
    rows, _ = sweep(tmp_path, "--collective", "barrier", "--peer", "torch-gloo")
    assert [row["library"] for row in rows] == ["horoplug", "torch-gloo"]


@pytest.mark.parametrize("op", ["avg", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "int32"])
def test_sweep_of_ops_and_dtypes(tmp_path, op, dtype):
    rows, _ = sweep(tmp_path, "--op", op, "--dtype", dtype)
    assert len(rows) == 4


WRONG = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from harness import peers
class Deaf(peers.Horoplug):
    def prepare(self, case):
        x, run, _ = super().prepare(case)
        return peers.Prepared(x, lambda: x)
import {program}
from harness import job
job.Horoplug = Deaf
sys.exit({program}.main())
"""


def test_wrong_results_are_counted_and_fail_the_benchmark(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(WRONG.format(program="allreduce"))
    options = ["-b", "64", "-e", "64", "-n", "5", "--json", tmp_path / "table.json"]
    launch = [sys.executable, "-m", "horoplug.runner", "-np", "2", sys.executable, script]
    command = [str(word) for word in [*launch, BENCHMARKS, *options]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), cwd=ROOT)
    assert done.returncode == 1
    found = json.loads((tmp_path / "table.json").read_text())
    assert found["wrong"] == found["rows"][0]["wrong"] > 0


# ---- peers that need MPI ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mpi.KINDS)
def test_sweep_with_mpi_peers(tmp_path, name):
    pytest.importorskip("mpi4py")
    if mpi.find(name) is None:
        pytest.skip(f"{name} is not installed: make mpi")
    rows, text = sweep(tmp_path, "--peer", f"mpi4py:{name}")
    maker = {"openmpi": "Open MPI", "mpich": "MPICH", "impi": "Intel"}[name]
    assert f"# mpi4py:{name}: {maker}" in text
    assert {row["library"] for row in rows} == {"horoplug", f"mpi4py:{name}"}


@pytest.mark.parametrize("name", mpi.KINDS)
def test_mpi_is_found_by_its_files(tmp_path, monkeypatch, name):
    kind = mpi.KINDS[name]
    for file in (f"bin/{kind.marker}", "bin/mpirun", f"lib/{kind.library}"):
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    monkeypatch.setattr(mpi, "BUILD", tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "elsewhere" / "bin" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = mpi.find(name)
    assert found.mpirun == tmp_path / name / "bin" / "mpirun"
    assert found.environment()["MPI4PY_LIBMPI"] == str(tmp_path / name / "lib" / kind.library)
    assert mpi.installed() == [name]


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("allreduce", "-b 8 -e 64 -f 8 -n 5"),
        ("gradients", "--model 3x1KiB -n 2"),
        ("train", "--model cnn --steps 2 --blocks 1"),
    ],
)
def test_benchmark_with_peer_horovod(tmp_path, program, options):
    """horoplug under the name horovod replaces Horovod, since it has the same API."""
    pytest.importorskip("torch")
    table = tmp_path / "table.json"
    script = [sys.executable, BENCHMARKS / f"{program}.py", *options.split(), "--peer", "horovod"]
    launch = [sys.executable, "-m", "horoplug.runner", "--compat", "-np", "2"]
    command = [str(word) for word in [*launch, *script, "--json", table]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [row.get("library", row.get("variant")) for row in record(table)["rows"]]
    assert {"horoplug", "horovod"} <= set(names)


def test_unavailable_peers_are_refused(tmp_path):
    for peer in ("nothing", "torch-gloo:mpich", "mpi4py:nothing"):
        run("allreduce", "-np", 2, "--peer", peer, status=2)
    run("gradients", "-np", 2, "--peer", "mpi4py:mpich", "--peer", "mpi4py:openmpi", status=2)


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "tensors", "elements", "first", "last"),
    [
        ("resnet50", 161, 25_557_032, (1000,), (64, 3, 7, 7)),
        ("bert-large", 391, 335_141_888, (1024,), (30522, 1024)),
        ("200x1KiB", 200, 51_200, (256,), (256,)),
        ("3x2M", 3, 3 * 2**19, (2**19,), (2**19,)),
    ],
)
def test_model_sizes(model, tensors, elements, first, last):
    """The numbers of parameters equal those of the papers' reference implementations."""
    shapes = models.gradients(model)
    assert len(shapes) == tensors
    assert models.elements(shapes) == elements
    assert (shapes[0], shapes[-1]) == (first, last)


def test_unknown_model_is_refused():
    with pytest.raises(ValueError, match="vgg: not resnet50"):
        models.gradients("vgg")


# ---- the control plane -----------------------------------------------------------------------------------------------


@needs_binary
@pytest.mark.parametrize(
    ("ranks", "tensors", "bursts", "per_host"), [(2, 3, 1, 8), (100, 20, 3, 8), (403, 7, 2, 5)]
)
def test_ranks_with_equal_subtrees_can_share_a_negotiator(ranks, tensors, bursts, per_host):
    numbers = map(str, (ranks, tensors, bursts, 3, per_host))
    command = [str(BINARY), *numbers]
    full, symmetric = (
        json.loads(subprocess.check_output([*command, mode], timeout=scaled(100)))
        for mode in ("full", "symmetric")
    )
    assert full["simulated"] == ranks
    assert symmetric["simulated"] < 10
    assert full["steps"] == symmetric["steps"]


def test_horovod_protocol_costs():
    """With two ranks, 60 cached tensors and four status bits, a cycle sends one word in each direction."""
    later = control_plane.horovod(2, 60, 600, 1, first=False)
    assert later == control_plane.Traffic(1, 8, 2, 16)
    assert control_plane.horovod(2, 61, 600, 1, first=False).bytes == 16
    first = control_plane.horovod(2, 60, 600, 1, first=True)
    requests, responses = 600 + 60 * (30 + 16), 600 + 60 * 8
    assert first.messages == 1 + 2
    assert first.bytes == 8 + (4 + requests + 4 + responses) / 2
    # The bytes that rank 0 receives grow with the number of ranks, those that it sends with its logarithm.
    many = control_plane.horovod(1024, 60, 600, 1, first=True)
    assert many.busiest_bytes == 2 * 10 * 8 + 1023 * (4 + requests) + 10 * (4 + responses)


# ---- all benchmarks, and the report ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A function that runs a part of the tiny suite, once, and returns the path of its record."""
    folder = tmp_path_factory.mktemp("measured")

    def measure(part):
        path = folder / f"{part.name}.json"
        if not path.exists():
            assert suite.run(part, folder) == ""
        return path

    return measure


PARTS = {part.name: part for part in suite.TINY}


@pytest.mark.parametrize(
    "name",
    [
        "allreduce",
        "gradients",
        "train",
        "idle",
        pytest.param("control-plane", marks=needs_binary),
        pytest.param("raw", marks=needs_binary),
        "torch-hooks",
        "frameworks",
        "start",
        "commit",
        "elastic",
        "elastic-2",
        "calls",
        "c10d",
        "ddp",
    ],
)
def test_tiny_form_of_every_benchmark(measured, name):
    pytest.importorskip("torch")
    if name == "frameworks":
        pytest.importorskip("tensorflow")
        pytest.importorskip("jax")
    part = PARTS[name]
    found = record(measured(part))
    assert found["benchmark"] == part.program
    alone = ("control-plane", "raw", "start", "commit", "elastic", "elastic-2", "calls")
    assert found["ranks"] == (1 if name in alone else 2)
    if name == "gradients":
        variants = ["horoplug", "horoplug, views", "horoplug, one by one", "horoplug, grouped"]
        variants += ["torch-gloo", "torch-gloo, buckets"]
        assert [row["variant"] for row in found["rows"]] == variants
    if name == "frameworks":
        frameworks = ["PyTorch", "TensorFlow, eager", "TensorFlow, graph"]
        frameworks += ["Keras, apply", "Keras, fit", "JAX, jit"]
        assert [row["framework"] for row in found["rows"]] == frameworks
        first = found["rows"][0]
        assert first["step"] == first["over"] == 1
        for row in found["rows"]:
            assert row["overhead"] == pytest.approx(row["time"] - row["alone"])
            assert row["step"] == pytest.approx(row["time"] / first["time"])
    if name == "train":
        alone, _, _, own, *_ = found["rows"]
        variants = ["alone", "apart", "apart, DDP", "horoplug", "horoplug, views", "torch-gloo"]
        assert [row["variant"] for row in found["rows"]] == variants
        assert own["efficiency"] == pytest.approx(100 * alone["time"] / own["time"])
    if name == "calls":
        kinds = [(row["framework"], row["call"]) for row in found["rows"]]
        assert kinds[-4:] == [("c10d", each) for each in ("blocking", "started", "many", "wrapper")]
    if name == "c10d":
        libraries = ["horoplug", "horoplug-torch", "torch-horoplug", "torch-gloo"]
        assert [row["library"] for row in found["rows"]] == libraries * 3
        assert found["title"].startswith("allreduce, float32, in PyTorch, ")
    if name == "ddp":
        variants = ["alone", "alone, DDP", "horoplug", "torch-horoplug", "torch-gloo"]
        assert [row["variant"] for row in found["rows"]] == variants * 2
    if name == "idle":
        assert [row["situation"] for row in found["rows"]] == ["idle", "straggler", "straggler"]
    if name == "start":
        what = ["processes", "init", "connect", "table", "barrier"]
        assert [row["what"] for row in found["rows"]] == what
    if name == "commit":
        assert [row["way"] for row in found["rows"]] == ["TorchState", "deepcopy"]
    if name == "elastic":
        measures = [(row["measure"], row["way"]) for row in found["rows"]]
        assert measures == [("recovery", "rollback=False"), ("admission", "rollback=False")]
    if name == "elastic-2":
        measures = [(row["measure"], row["way"]) for row in found["rows"]]
        assert measures == [("step", "plain"), ("step", "rollback=False")]
    if name == "raw":
        libraries = [row["library"] for row in found["rows"] if row["library"] != "oneccl"]
        assert libraries == [*raw.OURS, *mpi.installed()]
    if name == "control-plane":
        rows = [row for row in found["rows"] if row["protocol"] == "horoplug, later steps"]
        assert [row["ranks"] for row in rows] == [2, 16, 128, 1024, 8192, 65536]


@pytest.mark.slow
def test_training_with_compiled_steps(tmp_path):
    pytest.importorskip("torch")
    table = tmp_path / "table.json"
    run("train", "-np", 2, "--model", "cnn", "--steps", 2, "--blocks", 1, "--compile", "--json", table)  # fmt: skip
    variants = ["alone", "apart", "apart, compiled", "horoplug", "horoplug, compiled"]
    variants += ["horoplug, views", "horoplug, views, compiled"]
    assert [row["variant"] for row in record(table)["rows"]] == variants


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_comparison_of_the_checkout_with_itself(tmp_path):
    """Two rounds of jobs, of which a second command repeats none."""
    table = tmp_path / "table.json"
    options = ["--tiny", "--only", "allreduce", "--rounds", 2, "--out", tmp_path, "--json", table]
    for _ in range(2):
        text = run("compare", ROOT, *options)
        found = record(table)
        assert [row["row"] for row in found["rows"]] == ["4", "64"]
        for row in found["rows"]:
            assert (row["benchmark"], row["figure"], row["pairs"]) == ("allreduce", "time µs", 2)
            assert row["base"] > 0
            assert row["new"] > 0
    assert "# pairs of jobs that had been measured before: 2" in text
    assert len(list(tmp_path.glob("results/*/allreduce-*.json"))) == 2


def test_suites_name_their_parts_once_and_options_that_exist():
    for parts in suite.SUITES.values():
        assert len({part.name for part in parts}) == len(parts)
        for part in parts:
            assert (BENCHMARKS / f"{part.program}.py").exists()
            suite.missing(part)


def test_report_has_every_plot_and_table(measured, tmp_path):
    pytest.importorskip("torch")
    names = ["torch-hooks", "allreduce"] + (["control-plane"] if BINARY.exists() else [])
    for name in names:
        (tmp_path / f"{name}.json").write_text(measured(PARTS[name]).read_text())
    # A second record with another peer shares the section and the plots.
    other = json.loads((tmp_path / "allreduce.json").read_text())
    for row in other["rows"]:
        row["library"] = row["library"].replace("torch-gloo", "a <peer>")
    (tmp_path / "other.json").write_text(json.dumps(other))
    page = tmp_path / "folder" / "page.md"
    run("report", tmp_path, "-o", page)
    text = page.read_text()
    assert re.findall("^## (.*)$", text, re.MULTILINE) == [
        "Allreduce, float32, 2 ranks on 1 host(s)",
        *(["Control plane, 20 tensors in 2 burst(s)"] if BINARY.exists() else []),
        "Gradient hooks, 2 rank(s)",
    ]
    drawings = re.findall(r"^!\[.*\]\((.*)\)$", text, re.MULTILINE)
    assert len(drawings) == 1 + BINARY.exists()
    words = "".join(ElementTree.parse(page.parent / drawings[0]).getroot().itertext())
    for label in ("horoplug", "torch-gloo", "a <peer>", "time (µs)", "size (B)"):
        assert label in words
    assert r"a \<peer\>" in text
    assert other["machine"]["kernel"].replace("_", r"\_") in text


def record_of(benchmark, title, rows):
    return {"benchmark": benchmark, "title": title, "rows": rows}


def test_summary_says_where_horoplug_wins_and_where_it_loses():
    def sweep_of(title, ratios, benchmark="allreduce"):
        rows = [
            {"size": size, "library": library, "ratio": ratio}
            for library, by_size in {
                "horoplug": dict.fromkeys((4, 64, 1 << 20), 1.0),
                **ratios,
            }.items()
            for size, ratio in by_size.items()
        ]
        return record_of(benchmark, title, rows)

    title = "allreduce, float32, 2 ranks on 1 host(s)"
    records = [
        sweep_of(title, {"mpi4py:openmpi": {4: 0.5, 64: 0.4, 1 << 20: 3.0}}),
        sweep_of(title, {"torch-gloo": {4: 9.0, 64: 9.0, 1 << 20: 2.0}}),
        sweep_of("barrier, float32, 4 ranks on 1 host(s)", {"torch-gloo": {4: 0.8}}),
        sweep_of("allreduce, float32, between network namespaces, unshaped", {"torch-gloo": {4: 2.0}}, "network"),
        record_of(
            "gradients",
            "gradients, 2 ranks on 1 host(s)",
            [
                {"model": "resnet50", "variant": "mpi4py:impi, bare", "ratio": 2.0},
                {"model": "resnet50", "variant": "torch-gloo, buckets", "ratio": 8.0},
            ],
        ),
        record_of(
            "train",
            "training, 2 ranks on 1 host(s)",
            [
                {"model": "mlp", "variant": variant, "efficiency": value}
                for variant, value in (("horoplug", 80.0), ("torch-gloo", 50.0), ("apart", 90.0))
            ],
        ),
    ]  # fmt: skip
    two, other, gradients, training, network = summary.lines(records)
    assert two.startswith(
        "**Allreduce, 2 ranks on a host:** horoplug is the fastest, or within 3 % of it, at 1 MiB; at 1 MiB the next "
        "one takes 2.0 times as long. At 4 B to 64 B mpi4py:openmpi is the fastest, and horoplug takes 2.0 to 2.5 "
        "times as long. A small operation also pays"
    )
    assert (
        "in 0 of 1 rows. The worst one: it takes 1.2 times as long (barrier of 4 B, 4 ranks, beside torch-gloo)."
        in other
    )
    assert gradients.endswith(
        "for resnet50, horoplug takes 0.50 times as long as the bare calls of the fastest MPI and is 8.0 times as fast "
        "as gloo in the buckets of DDP."
    )
    assert training.endswith(
        "the mlp reaches 80 %, DDP on gloo 50 %, processes that reduce nothing 90 %."
    )
    assert network.startswith("**Between hosts, unshaped:** horoplug is the fastest")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_suite_goes_on_where_it_stopped(tmp_path):
    options = ["tiny", "--only", "allreduce", "--resume", "--out", tmp_path]
    assert "allreduce: done" in run("suite", *options)
    (file,) = tmp_path.glob("*/allreduce.json")
    before = file.read_bytes()
    assert "allreduce: was measured before" in run("suite", *options)
    assert file.read_bytes() == before


def test_report_is_rewritten_from_its_figures(measured, tmp_path):
    """figures.json suffices to write the same page and plots again."""
    pytest.importorskip("torch")
    (tmp_path / "allreduce.json").write_text(measured(PARTS["allreduce"]).read_text())
    run("report", tmp_path, "-o", tmp_path / "first" / "page.md")
    run("report", tmp_path / "first" / "page", "-o", tmp_path / "second" / "page.md")
    files = [path.relative_to(tmp_path / "first") for path in tmp_path.glob("first/**/*.*")]
    assert len(files) == 3
    for name in files:
        assert (tmp_path / "first" / name).read_text() == (tmp_path / "second" / name).read_text()


def test_report_without_figures(tmp_path):
    run("report", tmp_path, "-o", tmp_path / "page.md", status=1)


def test_recorded_report_is_current(tmp_path):
    """docs/benchmarks.md and its plots equal the output of report.py for the recorded figures."""
    run("report", ROOT / "docs" / "benchmarks", "-o", tmp_path / "benchmarks.md")
    assert (tmp_path / "benchmarks.md").read_text() == (ROOT / "docs/benchmarks.md").read_text()
    names = {path.name for path in (ROOT / "docs" / "benchmarks").iterdir()}
    assert names == {path.name for path in (tmp_path / "benchmarks").iterdir()}


def test_gpu_results_table_is_updated():
    """A measurement updates its row in the table of docs/gpu-results.md and nothing else."""
    page = gpu_results.PAGE.read_text()
    for how, rows in ((gpu.HOW, gpu.rows()), (seen.HOW, [*seen.rows().values()])):
        assert gpu_results.updated(page, how, rows) == page, "every row is there"
    first, second, *_ = gpu.rows()
    update = functools.partial(gpu_results.updated, how=gpu.HOW, rows=gpu.rows())
    once = update(page, where="Monday, a GPU", found={first: "91 %"})
    twice = update(once, where="Tuesday, a GPU", found={second: "92 %"})
    changed = [line for line in twice.splitlines() if line not in page.splitlines()]
    assert changed == [
        f"| {first} | `make bench-gpu` | Monday, a GPU | 91 % |",
        f"| {second} | `make bench-gpu` | Tuesday, a GPU | 92 % |",
    ]


@pytest.mark.skipif(not gpu.MOVE_BENCH.exists(), reason="make cpp-release builds it")
def test_gpu_kernel_benchmark(tmp_path, monkeypatch):
    """The benchmark times packing and unpacking, here on a simulated GPU, whose times are meaningless."""
    for name, value in simulated_gpu.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu, "MODELS", ("3x1KiB",))
    found = gpu.kernels()
    assert list(found) == [row for row in gpu.rows() if row.startswith(("Pack", "Unpack", "CPU"))]
    assert all(re.search(r"\d+% of \d+ GB/s|\d\.\d µs", text) for text in found.values())
