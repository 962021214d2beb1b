"""Run examples/pytorch/train.py, without a change, on the workers of a cluster of Ray.

    python examples/ray/train_fashion.py --workers 2                                   # a cluster on this machine
    python examples/ray/train_fashion.py --address auto --workers 8 -- --epochs 5      # the cluster of this node

Arguments after ``--`` are those of train.py. Its code is sent to the workers; the data (--data-dir) have to be on every
node.
"""

import argparse
import sys
from pathlib import Path

import cloudpickle
import ray

from horoplug.ray import RayExecutor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pytorch"))

import train

cloudpickle.register_pickle_by_value(train)  # the other nodes do not have the file


def run(arguments: list[str]) -> None:
    """The program, on one rank."""
    sys.argv = ["train.py", *arguments]
    train.main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--address", help="the cluster; default: that of RAY_ADDRESS, or one on this machine")
    add("--workers", type=int, default=2, help="number of ranks")
    add("--gpu", action="store_true", help="one GPU for each worker")
    add("arguments", nargs="*", help="arguments of train.py, after --")
    args = parser.parse_args()

    ray.init(address=args.address)
    settings = RayExecutor.create_settings(timeout_s=120)
    with RayExecutor(settings, num_workers=args.workers, use_gpu=args.gpu) as executor:
        executor.start()
        executor.run(run, [[*args.arguments, *(["--gpu"] if args.gpu else [])]])


if __name__ == "__main__":
    main()
