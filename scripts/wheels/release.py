"""Checks that a release can be made of the last commit and of what build.py has built of it: release.py FOLDER

Writes FOLDER/SHA256SUMS and says what to do next. docs/releasing.md describes a release."""

import datetime
import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS: list[str] = []


def expect(holds: bool, problem: str) -> None:
    if not holds:
        PROBLEMS.append(problem)


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True).strip()


def version() -> str:
    found = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found
    return found[1]


def check_repository(of: str) -> None:
    expect(not git("status", "--porcelain"), "commit or remove what git status lists")
    tagged = git("tag", "--list", f"v{of}") and git("rev-list", "-n1", f"v{of}")
    expect(
        tagged in ("", git("rev-parse", "HEAD")),
        f"v{of} is the tag of another commit: give pyproject.toml a new version",
    )


def check_changelog(of: str) -> None:
    sections = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    expect(
        sections[0].strip() == "[Unreleased]",
        f"CHANGELOG.md: move what is under [Unreleased] to a section [{of}]",
    )
    heading = re.fullmatch(r"\[(\S+)\] - (\S+)", sections[1].splitlines()[0])
    expect(
        heading is not None and heading[1] == of,
        f"CHANGELOG.md: the first section after [Unreleased] is not '[{of}] - <date>'",
    )
    if heading:
        datetime.date.fromisoformat(heading[2])


def check_files(files: list[Path], of: str) -> None:
    for file in files:
        expect(file.name.startswith(f"horoplug-{of}"), f"{file.name} has another version than {of}")


def check_archive(archive: Path) -> None:
    """The source archive builds without a network, once its build requirements are installed."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-build-isolation", "--no-deps", "--no-index", "-w", folder]
        done = subprocess.run(
            ["unshare", "--net", sys.executable, "-m", "pip", "wheel", "-q", *options, archive]
        )
        expect(done.returncode == 0, f"{archive.name} does not build without a network")


def main(folder: str) -> None:
    files = sorted(f for f in Path(folder).iterdir() if f.suffix in (".whl", ".gz"))
    of = version()
    check_repository(of)
    check_changelog(of)
    check_files(files, of)
    for archive in files:
        if archive.suffix == ".gz":
            check_archive(archive)
    if PROBLEMS:
        sys.exit("\n".join(PROBLEMS))
    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files]
    (Path(folder) / "SHA256SUMS").write_text("".join(lines))
    print(f"horoplug {of}: {len(files)} files can be released. Next:")
    print(f"  git tag -s v{of} && git push origin v{of}")
    print(f"  twine upload {folder}/*.whl {folder}/*.tar.gz")


if __name__ == "__main__":
    main(*sys.argv[1:])
