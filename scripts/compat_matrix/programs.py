"""The programs that run in the environments, and how each is started."""

from dataclasses import dataclass, field

FOLDER = "tests/versions/programs"


@dataclass(frozen=True)
class Program:
    """One job. ``command``: ``{bin}`` is the environment's folder of programs, ``{examples}`` the copied examples."""

    name: str  # the column on docs/versions.md
    command: str
    ranks: int = 1  # each of them writes a file
    dies: int | None = None  # the rank that is killed; the launcher's exit code must not be 0
    says: str = ""  # a program without such files: a regular expression for its output
    variables: dict[str, str] = field(default_factory=dict)
    seconds: int = 240


def _job(ranks: int, program: str) -> str:
    return f"{{bin}}/horovodrun -np {ranks} {{bin}}/python {program}"


def _operations(framework: str) -> list[Program]:
    return [
        Program(f"operations, {ranks} ranks", _job(ranks, f"operations.py {framework}"), ranks)
        for ranks in (2, 3)
    ]


def _optimizer(file: str) -> Program:
    return Program("optimizer", _job(2, file), 2)


def _killed(framework: str) -> Program:
    return Program("killed rank", _job(3, f"killed.py {framework}"), 3, dies=1)


def _example(file: str, says: str = r"accuracy [1-9]", samples: int = 2000) -> Program:
    command = f"{{examples}}/{file} --epochs 1 --max-samples {samples}"
    return Program("example", _job(2, command), 0, says=says)


def _cluster(name: str, example: str) -> list[Program]:
    return [
        Program("jobs", f"{{bin}}/python {name}_jobs.py jobs"),
        Program("example", f"{{bin}}/python {{examples}}/{example}", 0, says="accuracy"),
        Program("killed rank", f"{{bin}}/python {name}_jobs.py killed"),
    ]


def _mpirun(name: str, command: str, ranks: int, **more) -> Program:
    return Program(
        name, f"{{bin}}/mpirun {{mpirun}} -np {ranks} {{bin}}/python {command}", ranks, **more
    )


_OVER_MPI = {"HOROVOD_CPU_OPERATIONS": "mpi"}

PROGRAMS: dict[str, list[Program]] = {
    "torch": [
        *_operations("torch"),
        _optimizer("optimizer_torch.py"),
        Program(
            "torch.distributed",
            "{bin}/python -m torch.distributed.run --nproc-per-node 2 process_group.py",
            2,
        ),
        _example("pytorch/train.py"),
        _killed("torch"),
    ],
    "tensorflow": [
        *_operations("tensorflow"),
        _optimizer("optimizer_tensorflow.py"),
        _example("tensorflow/train.py"),
        _killed("tensorflow"),
    ],
    "jax": [
        *_operations("jax"),
        _optimizer("optimizer_jax.py"),
        _example("jax/train_fashion.py"),
        _killed("jax"),
    ],
    "keras": [
        _optimizer("optimizer_keras.py keras"),
        _example("keras/train.py"),
        _killed("{backend}"),
    ],
    "keras-2": [
        _optimizer("optimizer_keras.py tf.keras"),
        _example("tensorflow/train.py"),
        _killed("tensorflow"),
    ],
    "mxnet": [
        *_operations("mxnet"),
        _optimizer("optimizer_mxnet.py"),
        _example("mxnet/train.py"),
        _killed("mxnet"),
    ],
    "lightning": [_optimizer("lightning_fit.py"), _killed("torch")],
    "numpy": [*_operations("numpy"), _optimizer("optimizer_numpy.py"), _killed("numpy")],
    "mpi": [
        _mpirun("operations, 2 ranks", "operations.py numpy", 2),
        _mpirun("operations over MPI", "over_mpi.py operations.py numpy", 3, variables=_OVER_MPI),
        _mpirun("optimizer", "optimizer_numpy.py", 2),
        _mpirun("killed rank", "killed.py numpy", 3, dies=1),
    ],
    "ray": _cluster("ray", "ray/train_fashion.py --workers 2 -- --epochs 1 --max-samples 2000"),
    "spark": _cluster("spark", "spark/train_fashion.py --epochs 1 --max-samples 2000"),
}
