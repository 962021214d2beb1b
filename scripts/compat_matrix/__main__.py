"""make compat-matrix ONLY="torch-2.1 jax-0.5": runs these rows, or all, and writes docs/versions.md."""

import sys

from scripts.compat_matrix import page
from scripts.compat_matrix.results import run_row
from scripts.compat_matrix.rows import ROWS


def main() -> int:
    wanted = sys.argv[1:]
    unknown = set(wanted) - {row.name for row in ROWS}
    if unknown:
        sys.exit(
            f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(row.name for row in ROWS)}"
        )
    bad = []
    for row in ROWS:
        if not wanted or row.name in wanted:
            found = run_row(row)
            failed = [name for name, each in found["programs"].items() if each["failed"]]
            if "error" in found or failed:
                bad.append(f"{row.name} ({', '.join(failed) or 'no environment'})")
            page.write()
    print(f"failed: {'; '.join(bad)}" if bad else "all rows passed")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
