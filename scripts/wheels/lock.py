"""Writes requirements/wheels.txt: the versions and hashes that requirements/wheels.in leads to on this machine."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "requirements"


def main() -> None:
    options = ("--dry-run", "--ignore-installed", "-q", "--only-binary=:all:", "--report", "-")
    report = subprocess.check_output(
        [sys.executable, "-m", "pip", "install", *options, "-r", FOLDER / "wheels.in"]
    )
    lines = ["# Written by scripts/wheels/lock.py from wheels.in."]
    for package in sorted(
        json.loads(report)["install"], key=lambda p: p["metadata"]["name"].lower()
    ):
        name, version = package["metadata"]["name"].lower(), package["metadata"]["version"]
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{digest}")
    (FOLDER / "wheels.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
