"""The programs of the tutorials train: as printed, and with the changed lines on one rank and on two.

A tutorial has one block of Python, the program for one process, and one block ``diff``. Empty lines divide the diff
into hunks, each of which stands for consecutive lines of the program. The outputs on the pages are those of runs."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import ROOT
from tests.harness.limits import scaled
from tests.harness.support import environment

MXNET = ROOT / ".venv-mxnet" / "bin" / "python"
# The arrays of the trained model, by page.
PARAMETERS = {
    "pytorch": "[p.detach().numpy() for p in model.parameters()]",
    "tensorflow": "[v.numpy() for v in model.variables]",
    "keras": "model.get_weights()",
    "jax": "[np.asarray(leaf) for leaf in jax.tree.leaves(params)]",
    "mxnet": "[p.data().asnumpy() for p in net.collect_params().values()]",
}
DIGEST = """
import hashlib
data = b"".join(array.tobytes() for array in {parameters})
print("digest", hashlib.sha256(data).hexdigest())
"""
NEEDS = {"pytorch": ["torch"], "tensorflow": ["tensorflow"], "jax": ["jax", "optax"]}


def blocks(page, language):
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def patched(program, diff):
    """The program with the changes of a diff."""
    for hunk in diff.strip("\n").split("\n\n"):
        lines = hunk.splitlines()
        assert all(line[0] in " +-" for line in lines), hunk
        old = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
        assert f"\n{program}".count(f"\n{old}") == 1, f"not once in the program:\n{old}"
        program = f"\n{program}".replace(f"\n{old}", f"\n{new}")[1:]
    return program


def programs(name):
    """The program of a tutorial for one process, and the distributed one."""
    (program,) = blocks(f"tutorial-{name}.md", "python")
    (diff,) = blocks(f"tutorial-{name}.md", "diff")
    return program, patched(program, diff)


def python_for(name, backend=""):
    """The interpreter with the framework of a tutorial. Skips the test if there is none."""
    if name == "mxnet":
        if not MXNET.exists():
            pytest.skip("make environments makes .venv-mxnet")
        return str(MXNET)
    for module in NEEDS.get(name, ["keras", backend]):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    return sys.executable


def run(*command, backend="", attempts=1):
    """The lines that a program prints. It is repeated if it fails, up to a number of attempts."""
    for _ in range(attempts):
        done = subprocess.run(
            list(map(str, command)),
            env=environment()
            | {"KERAS_BACKEND": backend or "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=scaled(110),
        )
        if done.returncode == 0:
            return done.stdout.splitlines()
    pytest.fail(done.stdout + done.stderr)


def check_losses(lines, batches):
    """The lines have the texts of the tutorial, and the loss falls."""
    text = "\n".join(lines)
    losses = [float(number) for number in re.findall(r"loss:? ([\d.]+)", text)]
    assert len(losses) == 5, text
    assert losses == sorted(losses, reverse=True), text
    assert losses[0] < 0.69, f"worse than a guess:\n{text}"
    assert losses[-1] < 0.2, text
    if "accuracy" in text:
        assert text.count(f"{batches}/{batches} - ") == 5, text
        return
    assert [re.sub(r"[\d.]+$", "#", line) for line in lines] == [
        f"epoch {epoch}: loss #" for epoch in range(1, 6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("pytorch", ""),
        ("tensorflow", ""),
        ("keras", "tensorflow"),
        *(pytest.param("keras", each, marks=pytest.mark.matrix) for each in ("torch", "jax")),
        ("jax", ""),
        ("mxnet", ""),
    ],
)
@pytest.mark.short
def test_programs_of_a_tutorial_train(name, backend, tmp_path):
    python = python_for(name, backend)
    single, distributed = programs(name)
    program = tmp_path / "train.py"
    program.write_text(single)
    check_losses(run(python, program, backend=backend), 256)

    program.write_text(distributed + DIGEST.format(parameters=PARAMETERS[name]))
    for size in 1, 2:
        lines = run(
            *(python, "-m", "horoplug.runner", "-np", size, python, program), backend=backend
        )
        found = [re.fullmatch(r"\[(\d)\]<stdout>:(.*)", line) for line in lines]
        assert all(found), lines
        digests = [match[2] for match in found if match[2].startswith("digest ")]
        assert len(digests) == size, lines
        assert len({*digests}) == 1, "ranks have different parameters"
        printed = [match for match in found if not match[2].startswith("digest ")]
        assert {match[1] for match in printed} == {"0"}, "only rank 0 prints"
        check_losses([match[2] for match in printed], 256 // size)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.short
def test_pages_show_the_output_of_the_programs(name):
    single, distributed = blocks(f"tutorial-{name}.md", "text")
    check_losses(single.splitlines(), 256)
    lines = distributed.splitlines()
    assert all(line.startswith("[0]<stdout>:") for line in lines)
    check_losses([line.removeprefix("[0]<stdout>:") for line in lines], 128)


@pytest.mark.short
def test_every_tutorial_is_tested():
    pages = {page.stem.removeprefix("tutorial-") for page in Path(ROOT).glob("docs/tutorial-*.md")}
    assert pages == {*PARAMETERS}


# ---- from-ddp.md ----------------------------------------------------------------------------------------------------


def finds_backend():
    """Whether PyTorch finds horoplug's backend by itself: since 2.5, if horoplug is installed."""
    import torch

    installed = importlib.metadata.entry_points(group="torch.backends")
    return hasattr(torch, "_import_device_backends") and "horoplug" in installed.names


@pytest.mark.slow
@pytest.mark.short
def test_programs_of_the_page_for_ddp_give_the_same_parameters(tmp_path):
    pytest.importorskip("torch")
    (program,) = blocks("from-ddp.md", "python")
    backend, optimizer = blocks("from-ddp.md", "diff")
    (shown,) = blocks("from-ddp.md", "text")
    kept = patched(program, backend)
    if not finds_backend():
        kept = f"import horoplug.torch\n{kept}"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    horovodrun = ("-m", "horoplug.runner", "-np", 2, sys.executable)
    outputs = []
    for text, launcher in (
        (program, torchrun),
        (kept, torchrun),
        (patched(program, optimizer), horovodrun),
    ):
        file = tmp_path / "train.py"
        file.write_text(text)
        # With Gloo, PyTorch 2.13 sometimes aborts a process that ends, and its output is lost.
        lines = run(sys.executable, *launcher, file, attempts=4 if text == program else 1)
        # Under torchrun, ranks may print two texts and then two line ends, if Python does not buffer its output.
        printed = r"rank \d: loss \d\.\d{6}, sum of the parameters \d\.\d{9}"
        outputs.append(sorted(re.findall(printed, "\n".join(lines))))
    first, *others = outputs
    assert all(other == first for other in others), outputs
    assert [re.sub(r"-?\d+\.\d+", "#", line) for line in first] == [
        re.sub(r"-?\d+\.\d+", "#", line) for line in shown.splitlines()
    ]
    totals = [line.split()[-1] for line in first]
    assert totals[0] == totals[1], "ranks have different parameters"
