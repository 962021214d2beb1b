"""The program of ``make demo``: train on two processes, then measure how much faster that is than one process. It ends
with the accuracy and the speed in the terminal and, if matplotlib is installed, in build/demo.png."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN, SPEEDUP = (Path("examples", "pytorch", name) for name in ("train.py", "speedup.py"))
PICTURE = ROOT / "build" / "demo.png"
BUSY = (
    0.1  # part of the processors that other programs use, from which on the machine counts as busy
)
WIDTH = 40  # characters of the longest bar in the terminal


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


def bars(title: str, values: dict[str, float], form: str, most: float) -> str:
    """A bar of the terminal for each value."""
    lines = [title]
    for name, value in values.items():
        lines.append(f"  {name:<12} {'█' * round(WIDTH * value / most):<{WIDTH}} {value:{form}}")
    return "\n".join(lines)


def results(trained: dict, speed: dict) -> tuple[dict[str, float], dict[str, float]]:
    """The test accuracy after each epoch, and the images per second of one process and of all."""
    accuracy = {f"epoch {i}": each["accuracy"] for i, each in enumerate(trained["epochs"], 1)}
    rates = {"1 process": speed["one"], f"{speed['processes']} processes": speed["several"]}
    return accuracy, rates


def draw(accuracy: dict[str, float], rates: dict[str, float], speed_up: float, file: Path) -> bool:
    """Write the picture. Returns False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([*accuracy], [100 * value for value in accuracy.values()], "o-")
    left.set(title="Test accuracy", ylabel="%", ylim=(0, 100))
    right.bar([*rates], [*rates.values()], color=["tab:gray", "tab:blue"])
    right.set(title=f"Images per second: speed-up {speed_up:.2f}")
    file.parent.mkdir(exist_ok=True)
    figure.savefig(file, dpi=150)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="count", help="number of processes")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the training data")
    args = parser.parse_args()

    launch = [sys.executable, "-m", "horoplug.runner", "-np", str(args.count), sys.executable]
    train = [*launch, str(TRAIN), "--epochs", str(args.epochs)]
    trained = run(f"training on {args.count} processes", train)
    speed = run("the same steps on one and on all processes, by turns", [*launch, str(SPEEDUP)])
    accuracy, rates = results(trained, speed)
    print(bars("--- test accuracy", accuracy, ".1%", 1.0))
    print(bars("--- images per second", rates, ",.0f", max(rates.values())))
    if draw(accuracy, rates, speed["speed_up"], PICTURE):
        print(f"--- picture: {PICTURE}")
    print(verdict(speed))


if __name__ == "__main__":
    main()
