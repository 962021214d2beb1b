"""``--compat``: which Python processes import horoplug as horovod, and that nothing else changes in them."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from horoplug.compat import SITE, python_path
from horoplug.compat.__main__ import command
from tests.harness.limits import scaled
from tests.harness.support import environment

COMPAT = ["-m", "horoplug.compat"]


def python(*arguments, env=None, cwd=None, stdin=""):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment() | (env or {}),
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )


def compat(code, **options):
    """The output of code in a Python process that imports horoplug as horovod."""
    done = python(*COMPAT, "-c", code, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- modules and attributes ------------------------------------------------------------------------------------------


@pytest.mark.short
def test_horovod_modules_are_horoplug_modules():
    compat("""
import importlib, sys
import horovod.torch as a
from horovod import torch as b
import horoplug.torch
assert a is b is horoplug.torch is sys.modules["horovod.torch"]
from horoplug.compat.names import MODULES
for name, target in MODULES.items():
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if "pip install" in str(error):  # the part needs a package that is not installed here
            assert name.split(".")[1] in ("mxnet", "ray", "spark"), name
            continue
        assert name == "horovod.torch.sync_batch_norm"  # if it is missing, it is missing under both names
        continue
    assert module is sys.modules[target], name
    assert module.__name__ == module.__spec__.name == target, name
    assert importlib.reload(module) is module or True
import horoplug.common.basics, horovod.common.basics
assert horovod.common.basics is not horoplug.common.basics is sys.modules["horoplug.common.basics"]
""")


def test_patching_one_name_patches_the_other():
    compat("""
from unittest import mock
import horovod.torch as hvd
with mock.patch("horovod.torch.elastic.sampler.size", return_value=4), \\
     mock.patch("horovod.torch.elastic.sampler.rank", return_value=3):
    sampler = hvd.elastic.ElasticSampler(list(range(8)), shuffle=False)
assert list(sampler) == [3, 7]
""")


def test_horovod_version_attributes():
    text = "import horovod, horoplug; print(horovod.__version__, horovod.horoplug_version)"
    installed = python("-c", "import horoplug; print(horoplug.__version__)").stdout.strip()
    assert compat(text).split() == ["0.28.1", installed]


def test_modules_are_imported_on_use():
    code = "import sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    seen = compat(code)
    assert all(f"'{name}'" not in seen for name in ("torch", "numpy", "horoplug", "horovod"))
    code = "import horovod, horovod.common.util, horovod.runner.common.util.env; " + code
    assert "'torch'" not in compat(code)


@pytest.mark.parametrize(
    ("statement", "missing"),
    [
        ("import horovod.tensorflow.data", "horovod.tensorflow.data"),
        ("import horovod.spark.tensorflow.compute_worker", "horovod.spark.tensorflow"),
        ("from horovod.spark.driver import driver_service", "horovod.spark.driver"),
        ("from horovod import data", "horovod.data"),
        ("import horovod; horovod.data", "horovod.data"),
        ("import horovod.runner.gloo_run", "horovod.runner.gloo_run"),
        ("from horovod.runner.common.util import hosts", "horovod.runner.common.util.hosts"),
        ("import horovod.data", "horovod.data"),
        ("import horovod.runner.driver", "horovod.runner.driver"),
    ],
)
@pytest.mark.short(failure=True)
def test_missing_modules_are_named(statement, missing):
    done = python(*COMPAT, "-c", statement)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    kind = "AttributeError" if "; " in statement else "ModuleNotFoundError"
    assert last == f"{kind}: horoplug does not provide {missing} yet"


def test_names_that_horovod_lacks_stay_missing():
    compat("""
import importlib.util
for statement in "import horovod.nonsense", "from horovod.torch import nonsense", "import horovod.torch.nonsense":
    try:
        exec(statement)
    except ImportError as error:
        assert "does not provide" not in str(error) and "nonsense" in str(error), error
    else:
        raise AssertionError(statement)
import horovod.torch
assert not hasattr(horovod, "nonsense") and not hasattr(horovod.torch, "nonsense")
assert not hasattr(horovod, "ray")
assert importlib.util.find_spec("horovod.torch") is not None
""")


def test_compat_runs_programs():
    compat("""
import horoplug, horovod, horovod.runner
from horovod import run
from horovod.runner import run as of_runner
assert horovod.run is horovod.runner.run is run is of_runner is horoplug.run
""")


def test_class_of_an_optimizer_names_horovod():
    """Programs look for "horovod" in the class's name, to see whether an optimizer is distributed."""
    text = """
import torch
import {package}.torch as hvd
hvd.init()
parameters = [torch.nn.Parameter(torch.ones(1))]
for op in hvd.Average, hvd.Adasum:
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(parameters), op=op)
    print("horovod" in str(optimizer.__class__), type(optimizer).__name__)
"""
    assert compat(text.format(package="horovod")).splitlines() == ["True Adam", "True Adam"]
    plain = python("-c", text.format(package="horoplug")).stdout.splitlines()
    assert plain == ["False Adam", "False Adam"]


@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_type_of_a_keras_optimizer_names_horovod(keras):
    """``__class__``, which Keras saves, stays its own: a file can be loaded without horoplug."""
    text = """
import {keras} as keras
import {package}.{module} as hvd
hvd.init()
plain, optimizer = (keras.optimizers.Adam(name="a") for _ in range(2))
optimizer = hvd.DistributedOptimizer(optimizer)
print("horovod" in str(type(optimizer)), type(optimizer).__name__)
print(keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(plain))
"""
    module = {"keras": "keras", "tf_keras": "tensorflow.keras"}[keras]
    variables = {"TF_USE_LEGACY_KERAS": "1"} if keras == "tf_keras" else {}
    for package, names in ("horovod", True), ("horoplug", False):
        code = text.format(keras=keras, package=package, module=module)
        lead = COMPAT if names else []
        done = python(*lead, "-c", code, env=environment() | variables)
        assert done.stdout.splitlines() == [f"{names} Adam", "True"], done.stderr


# ---- install() -------------------------------------------------------------------------------------------------------


def test_install_in_a_running_program():
    done = python(
        "-c",
        """
import sys
import horoplug.compat
for _ in range(3):
    horoplug.compat.install()
assert not {"torch", "numpy", "horovod", "horoplug._native"} & set(sys.modules)
assert sum("horoplug" in type(finder).__module__ for finder in sys.meta_path) == 1
import horovod.torch, horoplug.torch
assert horovod.torch is horoplug.torch
horoplug.compat.install()
assert sys.modules["horovod.torch"] is horoplug.torch
""",
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def real(tmp_path):
    """A folder with a package that is called horovod."""
    (tmp_path / "lib" / "horovod").mkdir(parents=True)
    (tmp_path / "lib" / "horovod" / "__init__.py").write_text("__version__ = 'real'")
    (tmp_path / "lib" / "horovod" / "common.py").write_text("real = True")
    return tmp_path / "lib"


@pytest.mark.parametrize(
    ("how", "imported"), [("install", False), ("install", True), ("run", False)]
)
def test_installed_horovod_is_replaced(real, how, imported):
    code = """
import horovod.common.util
assert horovod.__version__ == "0.28.1" and not hasattr(horovod.common, "real")
horoplug.compat.install()
"""
    if how == "install":
        code = "import horoplug.compat; horoplug.compat.install()" + code
    if imported:
        code = "import horovod.common; assert horovod.common.real\n" + code
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(real), env["PYTHONPATH"]])
    done = python(
        *(COMPAT if how == "run" else []), "-c", "import horoplug.compat\n" + code, env=env
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("horoplug.compat: horovod")
    assert imported or str(real) in line


# ---- python -m horoplug.compat is Python -----------------------------------------------------------------------------

SHOW = """
import os, pickle, sys
class Point:
    pass
def show():
    print(sys.argv, __name__, __package__, sys.path)
    print(sys.modules["__main__"].__dict__ is globals(), globals().get("__file__"))
    print(type(pickle.loads(pickle.dumps(Point()))) is Point, Point.__module__)
    print(sys.flags, sys.warnoptions, sys.orig_argv[-2:])
if __name__ == "__main__":
    show()
"""
SPAWN = """
import multiprocessing
class Point:
    def __init__(self, x):
        self.x = x
def double(point):
    return Point(2 * point.x)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [Point(1), Point(2)])[1].x)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    texts = {
        "show.py": SHOW,
        "spawn.py": SPAWN,
        "package/__init__.py": "",
        "package/__main__.py": SHOW,
        "package/part.py": SHOW + "from . import other\nprint(other.__name__)",
        "package/other.py": "",
        "folder/__main__.py": SHOW + "import beside",
        "folder/beside.py": "print(__name__)",
        "fails.py": "def f():\n    raise KeyError('ü')\nf()\n",
        "syntax.py": "print(\n",
        "exits.py": "import sys\nsys.exit(7)",
        "exit_text.py": "raise SystemExit('some text')",
        "atexit.py": "import atexit, os\natexit.register(print, 'bye')\nprint('on', end=' ')",
        "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "interrupted.py": "raise KeyboardInterrupt",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.write(folder / "show.py", "__main__.py")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        "show.py",
        "./show.py a -m b -- --c=d -x",
        "package/part.py",
        "-m package -x",
        "-m package.part a",
        "folder a",
        "zipped.zip a",
        "-mpackage",
        "-um package a",
        "-u -O -W error -X dev show.py -u",
        "-bb -Bs show.py",
        "-- show.py a",
        "spawn.py",
        "fails.py",
        "syntax.py",
        "exits.py",
        "exit_text.py",
        "atexit.py",
        "killed.py",
        "interrupted.py",
        "no-such.py",
        "-m no_such",
        "-m package.no_such",
        "--version",
        "--no-such-flag",
    ],
)
def test_compat_acts_as_the_python_interpreter(programs, arguments):
    plain = python(*arguments.split(), cwd=programs)
    ours = python(*COMPAT, *arguments.split(), cwd=programs)
    assert (ours.returncode, ours.stdout, ours.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )
    if arguments == "killed.py":
        assert ours.returncode == -signal.SIGTERM


@pytest.mark.parametrize("arguments", [["-c", SHOW, "a b", "", "-c"], ["-", "a"], []])
def test_compat_without_a_script(programs, arguments):
    plain = python(*arguments, cwd=programs, stdin=SHOW)
    ours = python(*COMPAT, *arguments, cwd=programs, stdin=SHOW)
    assert plain.stdout
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("original", "flags"),
    [
        ("python -m horoplug.compat", ""),
        ("python -mhoroplug.compat", ""),
        ("python -u -m horoplug.compat", "-u"),
        ("python -um horoplug.compat", "-u"),
        ("python -X dev -Bumhoroplug.compat", "-X dev -Bu"),
        ("python -m -m horoplug.compat", "-m"),
    ],
)
@pytest.mark.parametrize("rest", ["", "x.py -m horoplug.compat", "-mhoroplug.compat"])
def test_python_flags_are_forwarded(original, flags, rest):
    assert command(original.split() + rest.split(), rest.split()) == flags.split() + rest.split()


def test_python_flags_take_effect(programs):
    plain = python("-W", "error", "-u", "show.py", cwd=programs)
    ours = python("-W", "error", "-um", "horoplug.compat", "show.py", cwd=programs)
    assert ours.stdout == plain.stdout


@pytest.mark.parametrize("flag", ["-S", "-E"])
def test_unsupported_python_flags_are_refused(flag):
    # -S and -E also keep Python from finding horoplug.
    root = Path(SITE).parents[2]
    done = python(flag, "-m", "horoplug.compat", "-c", "print('ran')", cwd=root)
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not work with -S, -E and -I" in done.stderr


# ---- sitecustomize ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["print('custom', __file__)", "1 / 0", "import no_such", "x = 3"])
def test_other_sitecustomize_still_runs(tmp_path, text):
    (tmp_path / "sitecustomize.py").write_text(text)
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    code = (
        "import sys; s = sys.modules.get('sitecustomize'); print(getattr(s, 'x', None), sys.path)"
    )
    plain = python("-c", code, env=env)
    ours = python("-c", code + "\nimport horovod", env=env | {"PYTHONPATH": python_path(env)})
    assert ours.returncode == 0
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


def test_python_path():
    assert python_path({}) == python_path({"PYTHONPATH": ""}) == SITE
    assert python_path({"PYTHONPATH": "a::b"}) == os.pathsep.join([SITE, "a", "b"])
    assert python_path({"PYTHONPATH": python_path({"PYTHONPATH": "a"})}) == f"{SITE}:a"


def test_old_pythons_are_unaffected():
    text = (Path(SITE) / "sitecustomize.py").read_text()
    ast.parse(text, feature_version=(3, 5))
    assert not re.search(r"\bf[\"']", text)


def test_python_without_horoplug_is_reported():
    env = environment() | {"PYTHONPATH": SITE}
    code = """
import sys
sys.modules["horoplug"] = None  # as if it were not installed
print("before")
import horovod.torch
"""
    done = python("-c", code, env=env)
    assert (done.returncode, done.stdout) == (1, "before\n")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: horoplug provides horovod here")
    assert sys.executable in last


# ---- horovodrun --compat ---------------------------------------------------------------------------------------------

TRAIN = """
import horovod.torch as hvd
import torch
from horovod.common.util import env, split_list
from horovod.runner.common.util.env import get_env_rank_and_size
def train():
    hvd.init()
    assert (hvd.rank(), hvd.size()) == get_env_rank_and_size()
    assert hvd.mpi_ops._basics.rank() == hvd.rank()
    return int(hvd.allreduce(torch.ones(1), op=hvd.Sum))
"""


def horovodrun(*arguments, cwd):
    done = python("-m", "horoplug.runner", "-np", 2, *arguments, cwd=cwd)
    lines = [line.partition(":") for line in done.stdout.splitlines()]
    texts = {
        rank: [text for where, _, text in lines if where == f"[{rank}]<stdout>"] for rank in (0, 1)
    }
    return done, texts


@pytest.mark.short
def test_horovodrun_compat_with_python(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + "print('sum', train(), flush=True)")
    done, texts = horovodrun("--compat", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert texts == {0: ["sum 2"], 1: ["sum 2"]}


def test_horovodrun_compat_with_shells_and_child_processes(tmp_path):
    (tmp_path / "train.py").write_text("import horovod\nprint(horovod.__version__, flush=True)")
    command = f"{sys.executable} train.py && exec {sys.executable} -c 'import horovod.common.util'"
    done, texts = horovodrun("--compat", shutil.which("sh"), "-c", command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert texts == {0: ["0.28.1"], 1: ["0.28.1"]}


def test_horovodrun_compat_with_pytest(tmp_path):
    (tmp_path / "test_train.py").write_text(TRAIN + "def test_sum():\n    assert train() == 2\n")
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py"]
    done, texts = horovodrun("--compat", sys.executable, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert re.match(r"1 passed", texts[rank][-1])


def test_horovodrun_without_compat(tmp_path):
    done, _ = horovodrun(sys.executable, "-c", "import horovod", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'horovod'" in done.stderr
