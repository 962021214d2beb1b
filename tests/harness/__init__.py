"""Code that tests share: jobs of real ranks, simulated GPUs, hosts in network namespaces, launchers and MPIs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository
OPTIONAL = ROOT / "build" / "optional"  # packages that few tests need (requirements/optional.txt)
