"""Makes the environment of a row: a folder with a Python, the row's requirements, and the wheel of horoplug."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from scripts import other_pytorch
from scripts.compat_matrix.rows import Row
from scripts.wheels.pythons import pythons

ROOT = Path(__file__).resolve().parents[2]
WHEELS = Path(os.environ.get("HOROPLUG_TEST_WHEELS", ROOT / "dist" / "wheels"))
UV = ROOT / "build" / "versions" / ".tools" / "bin" / "uv"
# PyPI's PyTorch asks for them. Where they are missing, it computes on processors (scripts/other_pytorch.py).
NVIDIA = (
    "cublas",
    "cuda-cupti",
    "cuda-nvrtc",
    "cuda-runtime",
    "cudnn",
    "cufft",
    "cufile",
    "curand",
)
NVIDIA += ("cusolver", "cusparse", "cusparselt", "nccl", "nvjitlink", "nvshmem", "nvtx")
WITHOUT = [f"nvidia-{name}{end}" for name in NVIDIA for end in ("", "-cu12", "-cu13")]
WITHOUT += ["triton", "cuda-toolkit", "cuda-bindings", "cuda-python"]


def _run(*command: object, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=1800,
        env=os.environ | {"UV_CACHE_DIR": str(ROOT / ".cache" / "uv")} | variables,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def wheel(tag: str) -> Path:
    found = list(WHEELS.glob(f"horoplug-*-{tag}-*_{os.uname().machine}.whl"))
    if len(found) != 1:
        raise RuntimeError(f"{WHEELS} has {len(found)} wheels for {tag}: make wheels")
    return found[0]


class Environment:
    """A row's folder: ``python``, its environment, and ``work``, in which the programs run."""

    def __init__(self, row: Row, folder: Path) -> None:
        self._row, self.folder = row, folder
        self.home = folder / "python"
        self.bin = self.home / "bin"
        self.work = folder / "work"
        self._stubs = folder / "libraries"

    def make(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.work.mkdir(parents=True)
        interpreter = pythons().get(self._row.python)
        if interpreter is None:
            raise RuntimeError(f"this machine has no Python for {self._row.python}")
        _run(UV, "venv", "-q", "--python", interpreter, self.home)
        without = self.folder / "without.txt"
        without.write_text("\n".join(WITHOUT))
        install = (
            UV,
            "pip",
            "install",
            "-q",
            "--python",
            self.bin / "python",
            "--excludes",
            without,
        )
        if self._row.first:
            _run(*install, *self._row.first)
        path = f"{self.bin}:{os.environ['PATH']}"  # with mpicc
        _run(*install, *self._row.options, wheel(self._row.python), *self._row.requires, PATH=path)
        (packages,) = self.home.glob("lib/python3*/site-packages")
        if (packages / "torch").exists():
            self._replace_nvidia(packages)

    def _replace_nvidia(self, packages: Path) -> None:
        runtime = self.folder / "runtime"
        wanted = other_pytorch.cuda_runtime(packages)
        _run(UV, "pip", "install", "-q", "--no-deps", "--target", runtime, wanted)
        self._stubs.mkdir()
        other_pytorch.replace_libraries(packages, runtime, self._stubs)

    def versions(self) -> dict[str, str]:
        """The installed packages."""
        lines = _run(UV, "pip", "freeze", "--python", self.bin / "python").splitlines()
        found = dict(line.split("==") for line in lines if "==" in line)
        return {name.lower(): version for name, version in found.items()}

    def python(self) -> str:
        code = "import platform; print(platform.python_version())"
        return _run(self.bin / "python", "-c", code).strip()

    def variables(self) -> dict[str, str]:
        """Those of the programs. Nothing of the checkout is on a path."""
        known = {
            name: os.environ[name] for name in ("HOME", "LANG", "JAVA_HOME") if name in os.environ
        }
        return {
            **known,
            "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{self._stubs}:{self.home / 'lib'}",
            "OMP_NUM_THREADS": "1",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "JAX_PLATFORMS": "cpu",
            "PYTHONNOUSERSITE": "1",
            # Of MPI, for root and for more ranks than cores.
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            # Of Ray and Spark.
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_V2_ENABLED": "1",
            "PYSPARK_PYTHON": str(self.bin / "python"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            **self._row.variables,
        }

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


if sys.version_info < (3, 11):
    raise SystemExit("make compat-matrix needs Python 3.11 or newer")
