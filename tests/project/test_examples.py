"""The examples run on one process and under the launcher. (tests/torch/test_training.py covers train.py.)"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import OPTIONAL, ROOT
from tests.harness.limits import scaled
from tests.harness.support import environment, imported_example

EXAMPLES = ROOT / "examples" / "pytorch"
BENCHMARK = EXAMPLES / "synthetic_benchmark.py"
LANGUAGE_MODEL = EXAMPLES / "language_model.py"
JAX = ROOT / "examples" / "jax" / "train_fashion.py"

NUMBER = r"([\d,]+(?:\.\d+)?)"


def launch(program, *arguments, flags=(), size=2, variables=None):
    """Run a program on two ranks and return the stdout of each."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "horoplug.runner", "-np", str(size), *flags),
            *(sys.executable, str(program), *map(str, arguments)),
        ],
        env=environment() | (variables or {}),
        capture_output=True,
        text=True,
        timeout=scaled(110),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.fullmatch(r"\[(\d+)\]<stdout>:(.*)", line) for line in done.stdout.splitlines()]
    assert all(lines), done.stdout
    return ["\n".join(m[2] for m in lines if int(m[1]) == rank) for rank in range(size)]


def figures(pattern, text):
    """The numbers at the ``#`` of a pattern: a tuple for each match in the text."""
    found = re.findall(re.escape(pattern).replace(r"\#", NUMBER), text)
    assert found, f"no {pattern!r} in:\n{text}"
    groups = [each if isinstance(each, tuple) else (each,) for each in found]
    return [tuple(float(number.replace(",", "")) for number in group) for group in groups]


# ---- synthetic_benchmark.py -----------------------------------------------------------------------------------------

TINY = (
    *("--model", "tiny", "--image-size", 32, "--batch-size", 4),
    *("--num-warmup-batches", 1, "--num-batches-per-iter", 2, "--num-iters", 3),
)


def check_benchmark(texts, size):
    text, *others = texts
    assert others == [""] * (size - 1), "only rank 0 prints"
    iterations = figures("iteration #/3: # images/s per CPU process", text)
    assert [number for number, _ in iterations] == [1, 2, 3]
    ((mean, interval),) = figures("images/s per CPU process: # +-#", text)
    ((processes, total, of_total),) = figures("images/s on # CPU process(es): # +-#", text)
    assert processes == size
    rates = [rate for _, rate in iterations]
    average = sum(rates) / 3
    deviation = (sum((rate - average) ** 2 for rate in rates) / 3) ** 0.5
    assert mean == pytest.approx(average, abs=0.11)
    assert interval == pytest.approx(1.96 * deviation, abs=0.3)  # the printed numbers are rounded
    assert total == pytest.approx(size * mean, abs=0.1 * size)
    assert of_total == pytest.approx(size * interval, abs=0.1 * size)


@pytest.mark.parametrize("option", ["", "--bf16-allreduce"])
def test_benchmark_example(option):
    check_benchmark(launch(BENCHMARK, *TINY, *option.split()), 2)


def test_benchmark_runs_with_the_name_horovod(tmp_path):
    program = BENCHMARK.read_text()
    assert program.count("import horoplug.torch as hvd") == 1
    changed = tmp_path / "benchmark.py"
    changed.write_text(program.replace("horoplug.torch", "horovod.torch"))
    assert "horoplug" not in changed.read_text()
    check_benchmark(launch(changed, *TINY, "--fp16-allreduce", flags=["--compat"]), 2)


def test_benchmarks_default_model_is_a_resnet_50():
    module = imported(BENCHMARK)
    model = module.resnet(*module.MODELS["resnet50"])
    parameters = {name: p.shape for name, p in model.named_parameters()}
    assert sum(shape.numel() for shape in parameters.values()) == 25_557_032
    assert (
        sum(len(shape) == 4 for shape in parameters.values()) == 49 + 4
    )  # 4 of them are shortcuts


# ---- language_model.py ----------------------------------------------------------------------------------------------

SMALL = (
    *("--epochs", 2, "--max-characters", 20000, "--context", 16, "--width", 16, "--layers", 1),
    *("--batch-size", 16, "--warmup-steps", 5, "--lr", 0.02, "--sample", 40, "--threads", 1),
)
# Runs main() and prints a digest of the parameters. Keeps only the checkpoint of the first epoch.
DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import language_model
save = language_model.save
language_model.save = lambda *state: save(*state) if state[-1] == 1 else None
model = language_model.main(sys.argv[2:])
assert not any(p.isnan().any() for p in model.parameters())
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print("digest", hashlib.sha256(state).hexdigest())
"""


@pytest.fixture
def language_model(tmp_path):
    """A function that trains the small model and returns rank 0's output and the digest of each rank's parameters."""
    program = tmp_path / "digest.py"
    program.write_text(DIGEST)

    def run(*options, size=2):
        texts = launch(program, EXAMPLES, *SMALL, *options, size=size)
        assert all(re.fullmatch(r"digest \w{64}", text) for text in texts[1:])
        return texts[0], [text.split()[-1] for text in texts]

    return run


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.short
def test_language_model_learns(language_model, compression):
    text, digests = language_model("--compression", compression)
    assert len(set(digests)) == 1, "ranks have different parameters"
    epochs = figures("epoch #/2: # bits per character, validation #, # characters/s", text)
    assert [number for number, *_ in epochs] == [1, 2]
    (_, first, first_validation, _), (_, last, last_validation, rate) = epochs
    assert first < 6.5, "worse than a guess"
    assert last < first - 0.3
    assert last_validation < first_validation
    assert rate > 0
    sample = text.partition("---\n")[2].rpartition("\n")[0]
    assert sample.startswith("The ")
    assert len(sample) == 4 + 40


def test_language_model_continues_from_a_checkpoint(language_model, tmp_path):
    """Training that continues from the first epoch's checkpoint gives the same bits as uninterrupted training."""
    file = tmp_path / "checkpoint"
    text, digests = language_model("--checkpoint", file)
    assert "epoch 1/2" in text
    text, again = language_model("--checkpoint", file)
    assert "epoch 1/2" not in text
    assert "epoch 2/2" in text
    assert len({*digests, *again}) == 1


def test_language_model_refuses_too_short_a_text(tmp_path):
    text = tmp_path / "short"
    text.write_text("short")
    done = subprocess.run(
        [sys.executable, LANGUAGE_MODEL, "--text", text],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )
    assert done.returncode == 1
    assert (
        done.stderr == "A text of 5 characters is too short for 1 process(es) with --context 64.\n"
    )


# ---- tensorflow/train.py --------------------------------------------------------------------------------------------


@pytest.mark.short
def test_tensorflow_example_learns():
    pytest.importorskip("tensorflow")
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("Fashion-MNIST is not installed")
    program = ROOT / "examples" / "tensorflow" / "train.py"
    options = ("--epochs", 2, "--max-samples", 6000, "--json")
    text, other = launch(program, *options)
    assert other == "", "only rank 0 prints"
    summary = json.loads(text.splitlines()[-1])
    assert summary["processes"] == 2
    first, last = summary["epochs"]
    assert last["loss"] < first["loss"] - 0.2
    assert last["accuracy"] > 0.65, "chance is 0.1"


# ---- jax/train_fashion.py -------------------------------------------------------------------------------------------


@pytest.mark.short
def test_jax_example_learns():
    if importlib.util.find_spec("optax") is None:  # importing it would start JAX's threads
        pytest.skip("optax is not installed")
    text, other = launch(JAX, "--epochs", 2, "--max-samples", 4000)
    assert other == "", "only rank 0 prints"
    assert "4000 images of Fashion-MNIST, 2 process(es)" in text
    epochs = figures("epoch #/2: loss #, test accuracy #%, # images/s", text)
    assert [number for number, *_ in epochs] == [1, 2]
    (_, first, _, _), (_, last, accuracy, _) = epochs
    assert last < first < 2.3
    assert accuracy > 65


# ---- keras/train.py -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend",
    ["tensorflow", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("torch", "jax"))],
)
@pytest.mark.short
def test_keras_example_learns(backend, tmp_path):
    pytest.importorskip("keras")
    pytest.importorskip(f"horoplug.{backend}")
    model = tmp_path / "model.keras"
    text, other = launch(
        ROOT / "examples" / "keras" / "train.py",
        *("--max-samples", 4000, "--epochs", 2, "--batch-size", 32, "--save", model),
        variables={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert other == ""
    assert text.startswith("2 process(es), Keras 3")
    assert f"on {backend}\n" in text
    (_, first, _), (_, last, accuracy) = figures("epoch #: loss #, test accuracy #%", text)
    assert last < min(first, 2.0)
    assert accuracy > 40
    assert model.stat().st_size > 10_000


def imported(program):
    """A program as a module."""
    specification = importlib.util.spec_from_file_location(program.stem, program)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


# ---- make demo ------------------------------------------------------------------------------------------------------


@pytest.mark.short
def test_demo_ends_with_a_picture(tmp_path, monkeypatch):
    demo = imported_example("demo.py")
    trained = {"epochs": [{"accuracy": 0.5}, {"accuracy": 0.75}]}
    accuracy, rates = demo.results(trained, {"processes": 2, "one": 500.0, "several": 950.0})
    lines = demo.bars("accuracy", accuracy, ".1%", 1.0).splitlines()
    assert [line.count("█") for line in lines] == [0, 20, 30]
    assert lines[2].endswith(" 75.0%")
    monkeypatch.syspath_prepend(OPTIONAL)
    assert demo.draw(accuracy, rates, 1.9, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not demo.draw(accuracy, rates, 1.9, tmp_path / "none.png")


def test_speed_up_is_measured_by_turns_and_says_if_the_machine_is_busy():
    demo = imported_example("demo.py")
    found = {"processes": 2, "one": 500.0, "several": 950.0, "speed_up": 1.9, "others": 0.03}
    assert demo.verdict(found).endswith("speed-up 1.90 (one core per process)")
    assert "busy: other programs used 81% of its processors" in demo.verdict(
        found | {"others": 0.81}
    )
    text, *others = launch(EXAMPLES / "speedup.py", "--blocks", 2, "--seconds", 0.1, "--json")
    assert others == [""]
    measured = json.loads(text)
    assert set(measured) == set(found)
    assert measured["processes"] == 2
    assert measured["one"] > 0
    assert 0 <= measured["others"] <= 1
