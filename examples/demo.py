"""The program of ``make demo``: train on two processes, then briefly on one, and print the speed-up."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "examples" / "pytorch" / "train.py"


def run(title: str, command: list[str]) -> dict:
    """Run the training, forward its output, and return its line of JSON."""
    print(f"--- {title}:\n$ {' '.join(command)}", flush=True)
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    summary = None
    for line in process.stdout:
        # The launcher may put the rank before each line.
        start = line.find("{")
        if start >= 0 and line.rstrip().endswith("}"):
            summary = json.loads(line[start:])
        else:
            print(line, end="", flush=True)
    if process.wait() != 0 or summary is None:
        raise SystemExit(f"the training failed with status {process.returncode}")
    return summary


def rate(summary: dict) -> float:
    """Images per second of all processes in the fastest epoch, because the first epoch includes the warm-up."""
    return max(epoch["images_per_second"] for epoch in summary["epochs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="count", help="number of processes")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training data")
    args = parser.parse_args()

    train = [sys.executable, str(TRAIN.relative_to(ROOT))]
    launch = [sys.executable, "-m", "horoplug.runner", "-np", str(args.count)]
    # One thread for each process: the speed-up is that of several cores over one core.
    several = run(
        f"on {args.count} processes",
        [*launch, *train, "--threads", "1", "--epochs", str(args.epochs)],
    )
    one = run(
        "on one process, for comparison",
        [*train, "--threads", "1", "--epochs", "2", "--max-samples", "10000"],
    )
    print(
        f"--- {args.count} processes: {rate(several):,.0f} images/s; 1 process: {rate(one):,.0f} images/s; "
        f"speed-up {rate(several) / rate(one):.2f} (one core per process)"
    )


if __name__ == "__main__":
    main()
