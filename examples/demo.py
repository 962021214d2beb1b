"""The program of ``make demo``: train on two processes, then measure how much faster that is than one process."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN, SPEEDUP = (Path("examples", "pytorch", name) for name in ("train.py", "speedup.py"))
BUSY = (
    0.1  # part of the processors that other programs use, from which on the machine counts as busy
)


def run(title: str, command: list[str]) -> dict:
    """Run a program, forward its output, and return its line of JSON."""
    print(f"--- {title}:\n$ {' '.join(command)}", flush=True)
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    summary = None
    for line in process.stdout:
        # The launcher puts the rank before each line.
        start = line.find("{")
        if start >= 0 and line.rstrip().endswith("}"):
            summary = json.loads(line[start:])
        else:
            print(line, end="", flush=True)
    if process.wait() != 0 or summary is None:
        raise SystemExit(f"the program failed with status {process.returncode}")
    return summary


def verdict(speed: dict) -> str:
    """The last line of the demo, from what speedup.py has measured."""
    text = (
        f"--- {speed['processes']} processes: {speed['several']:,.0f} images/s; "
        f"1 process: {speed['one']:,.0f} images/s; speed-up {speed['speed_up']:.2f} (one core per process)"
    )
    if speed["others"] >= BUSY:
        text += (
            f"\n--- the machine is busy: other programs used {speed['others']:.0%} of its processors meanwhile, "
            "and a quiet machine has another speed-up"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="count", help="number of processes")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training data")
    args = parser.parse_args()

    launch = [sys.executable, "-m", "horoplug.runner", "-np", str(args.count), sys.executable]
    train = [*launch, str(TRAIN), "--epochs", str(args.epochs)]
    run(f"training on {args.count} processes", train)
    speed = run("the same steps on one and on all processes, by turns", [*launch, str(SPEEDUP)])
    print(verdict(speed))


if __name__ == "__main__":
    main()
