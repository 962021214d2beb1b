"""Code that tests share: jobs of real ranks, simulated GPUs, hosts in network namespaces, launchers and MPIs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository
OPTIONAL = ROOT / "build" / "optional"  # packages that few tests need (requirements/optional.txt)


def program_text(path: str) -> str:
    """The text of a program that tests run, which is a file in a folder ``programs``. ``path``: from the repository."""
    return (ROOT / path).read_text()
