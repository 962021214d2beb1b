"""``make test-c10d``: all cases of PyTorch's suite at 2, 3 and 4 ranks, with Gloo, with horoplug in its place, and with
horoplug under its own name.

Fails if a case that passes with Gloo does not pass with horoplug in its place and is not in the table differences.md,
or is in the table although it passes; and if a case fails under horoplug's own name. The suite then skips the cases
that ask for Gloo, but those of the table must pass."""

import sys

from tests.harness.pytorch_suite import BACKENDS, differences, run


def wrong(ranks: int) -> list[str]:
    """A line for each difference between the table and what happens, and for each failure under the own name."""
    table = {case: row["outcome"] for case, row in differences().items() if ranks in row["ranks"]}
    found = {}
    for backend in BACKENDS:
        found[backend], _ = run(ranks, backend, seconds=1800)
        outcomes = list(found[backend].values())
        print(
            f"{ranks} ranks, {backend}: {len(outcomes)} cases, {outcomes.count('passes')} pass, "
            f"{outcomes.count('is skipped')} are skipped, {outcomes.count('fails')} fail",
            flush=True,
        )
    gloo, in_place, own = found.values()
    lines = []
    for case, before in gloo.items():
        now = in_place.get(case, "is missing")
        expected = table.get(case, "passes")
        if before == "passes" and now != expected:
            lines.append(f"{ranks} ranks: {case} {now}, but according to the table it {expected}")
    lines += [
        f"{ranks} ranks: {case} {own.get(case, 'is missing')} under the name horoplug"
        for case in gloo
        if own.get(case) not in (("passes",) if case in table else ("passes", "is skipped"))
    ]
    unknown = [
        f"{ranks} ranks: {case} of the table does not exist" for case in set(table) - set(gloo)
    ]
    return lines + unknown


if __name__ == "__main__":
    found = [line for ranks in map(int, sys.argv[1:] or ["2", "3", "4"]) for line in wrong(ranks)]
    print("\n".join(found) or "the table of differences is right")
    sys.exit(bool(found))
