"""``make test-c10d``: all cases of PyTorch's suite at 2, 3 and 4 ranks, with horoplug and with Gloo.

Fails if a case that passes with Gloo does not pass with horoplug and is not in the table differences.md, or is in the
table although it passes."""

import sys

from tests.harness.pytorch_suite import differences, run


def wrong(ranks: int) -> list[str]:
    """A line for each difference between the table and what happens."""
    table = {case: row["outcome"] for case, row in differences().items() if ranks in row["ranks"]}
    gloo, _ = run(ranks, on_gloo=True, seconds=1800)
    horoplug, _ = run(ranks, seconds=1800)
    counts = {
        each: list(horoplug.values()).count(each) for each in ("passes", "fails", "is skipped")
    }
    print(
        f"{ranks} ranks: {len(horoplug)} cases, {counts['passes']} pass, {counts['is skipped']} are skipped, "
        f"{counts['fails']} fail; {list(gloo.values()).count('passes')} pass with Gloo",
        flush=True,
    )
    lines = []
    for case, before in gloo.items():
        now = horoplug.get(case, "is missing")
        expected = table.get(case, "passes")
        if before == "passes" and now != expected:
            lines.append(f"{ranks} ranks: {case} {now}, but according to the table it {expected}")
    unknown = [
        f"{ranks} ranks: {case} of the table does not exist" for case in set(table) - set(gloo)
    ]
    return lines + unknown


if __name__ == "__main__":
    found = [line for ranks in map(int, sys.argv[1:] or ["2", "3", "4"]) for line in wrong(ranks)]
    print("\n".join(found) or "the table of differences is right")
    sys.exit(bool(found))
