"""Builds the wheels and the source archive once more, of the last commit and in another folder, and compares their
bytes: again.py FOLDER, where FOLDER has those that build.py has made."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLONE = ROOT / "build" / "wheels-again"


def digests(folder: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.iterdir())
        if file.suffix in (".whl", ".gz")
    }


def main(folder: str) -> None:
    shutil.rmtree(CLONE, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ROOT, CLONE], check=True)
    # No caches of compilers: all of the C++ runtime is compiled again, too.
    variables = {name: text for name, text in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    build = [sys.executable, "scripts/wheels/build.py", "dist/wheels"]
    subprocess.run(build, check=True, cwd=CLONE, env=variables)
    first, second = digests(Path(folder)), digests(CLONE / "dist" / "wheels")
    differ = sorted(name for name in {*first, *second} if first.get(name) != second.get(name))
    if differ:
        sys.exit(f"two builds differ in {', '.join(differ)}; see {CLONE / 'dist' / 'wheels'}")
    print(f"two builds of {len(first)} files gave the same bytes")
    shutil.rmtree(CLONE)


if __name__ == "__main__":
    main(*sys.argv[1:])
