"""``make bench-compare``: what counts as slower, what is measured again and what is not, and the build of the base."""

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(ROOT)]

import compare  # noqa: E402
from harness import by_turns, checkout  # noqa: E402

from tests.harness.limits import scaled  # noqa: E402

LESS, MORE = by_turns.Better.LESS, by_turns.Better.MORE


# ---- ratios ----------------------------------------------------------------------------------------------------------


def test_median_and_interquartile_range():
    assert by_turns.Ratios.of([1.1, 0.9, 1.3, 1.0, 1.2]) == pytest.approx((1.1, 0.2, 5))


@pytest.mark.parametrize(
    ("ratios", "less", "more"),
    [
        ([1.04, 1.05, 1.05, 1.05, 1.06], "slower", "faster"),
        ([0.94, 0.95, 0.95, 0.95, 0.96], "faster", "slower"),
        ([1.00, 1.02, 1.05, 1.08, 1.10], "", ""),  # by less than the spread, 0.06
        ([0.90, 0.92, 0.95, 0.98, 1.00], "", ""),
        ([1.00, 1.02, 1.07, 1.08, 1.10], "slower", "faster"),
        ([1.05, 1.05, 1.05, 1.05], "", ""),  # too few
        ([1.00, 1.00, 1.00, 1.00, 1.00], "", ""),
    ],
)
def test_change_is_told_beyond_the_spread(ratios, less, more):
    found = by_turns.Ratios.of(ratios)
    assert (found.moved(LESS), found.moved(MORE)) == (less, more)


def test_change_below_the_threshold_is_not_told():
    found = by_turns.Ratios.of([1.02] * 5)
    assert found.moved(LESS, least=0.01) == "slower"
    assert found.moved(LESS, least=0.03) == ""


def test_order_of_jobs_alternates():
    assert [by_turns.order(pair, "a", "b")[0] for pair in range(4)] == ["a", "b", "a", "b"]


def test_rows_are_compared_pair_by_pair():
    part = compare.Part("x", "", "", ("variant", "size"), {"time": LESS, "rate": MORE}, "own")

    def record(time, rate):
        columns = {
            name: {"title": name, "unit": "s" * (name == "time")} for name in ("time", "rate")
        }
        own = {"variant": "own", "size": 8, "time": time, "rate": rate}
        peer = {"variant": "peer", "size": 8, "time": 1, "rate": 1}
        return {"columns": columns, "rows": [own, peer]}

    pairs = [
        {"base": record(2, 10), "new": record(3, 5)},
        {"base": record(1, 10), "new": record(1, None)},
        {"base": record(-1, 10), "new": record(4, 0)},  # a difference of times may be negative
    ]
    time, rate = compare.compared(part, pairs)
    assert time == ("own 8", "time s", 1.5, 2, (1.25, 0.25, 2), LESS)
    assert rate == ("own 8", "rate", 10, 5, (0.5, 0, 1), MORE)


@pytest.mark.parametrize("part", compare.PARTS, ids=lambda part: part.program)
def test_parts_name_columns_that_exist(part):
    pytest.importorskip("torch")
    columns = __import__(part.program).COLUMNS
    assert {*part.key, *part.figures} <= columns.keys()


# ---- the command, with jobs that only pretend to measure -------------------------------------------------------------


class Jobs:
    """Replaces the jobs. ``time`` is a function of the build and of the number of its earlier jobs, or an exception."""

    def __init__(self, monkeypatch, folder):
        self.ran = []
        self.time = lambda build, number: 1.0
        self.folder = folder
        self.checkout = checkout.Checkout(ROOT, "new")
        monkeypatch.setattr(compare.Comparison, "_job", lambda _, *words: self._job(*words))
        monkeypatch.setattr(compare, "identified", lambda _: self.checkout)
        monkeypatch.setattr(compare, "built", lambda *_: checkout.Checkout(folder, "base"))
        self.monkeypatch = monkeypatch

    def _job(self, part, options, build):
        time = self.time(build, self.ran.count((part.program, build)))
        self.ran.append((part.program, build))
        if isinstance(time, BaseException):
            raise time
        names = {*part.key, *part.figures}
        columns = {name: {"title": name, "unit": ""} for name in names}
        row = {name: "horoplug" if name in part.key else time for name in names}
        return {"columns": columns, "rows": [row]}

    def run(self, *options):
        """The exit status, and the rows of the table."""
        table = self.folder / "table.json"
        words = ["compare.py", "a-commit", "--out", self.folder, "--json", table, *options]
        if "--only" not in options:
            words += ["--only", "allreduce"]
        self.monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        self.ran.clear()
        return compare.main(), json.loads(table.read_text())["rows"]


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    return Jobs(monkeypatch, tmp_path)


def test_jobs_of_both_packages_alternate(jobs):
    status, rows = jobs.run("--only", "loops allreduce", "--rounds", 2)
    assert status == 0
    assert jobs.ran == [
        ("allreduce", "base"),
        ("allreduce", "new"),
        ("loops", "base"),
        ("loops", "new"),
        ("allreduce", "new"),
        ("allreduce", "base"),
        ("loops", "new"),
        ("loops", "base"),
    ]
    assert [(row["benchmark"], row["ratio"], row["pairs"]) for row in rows] == [
        ("allreduce", 1, 2),
        ("loops", 1, 2),
    ]


def test_slower_row_fails_after_further_rounds(jobs):
    jobs.time = lambda build, number: 1.1 if build == "new" else 1.0
    status, [row] = jobs.run()
    assert status == 1
    assert (row["moved"], row["pairs"]) == ("slower", 15)
    assert row["ratio"] == pytest.approx(1.1)


def test_row_that_further_rounds_do_not_confirm_passes(jobs):
    jobs.time = lambda build, number: 1.1 if build == "new" and number < 7 else 1.0
    status, [row] = jobs.run()
    assert (status, row["moved"], row["pairs"]) == (0, "", 15)


@pytest.mark.parametrize(("new", "moved"), [(1.02, "slower"), (0.8, "faster")])
def test_row_that_is_little_slower_or_faster_passes(jobs, new, moved):
    jobs.time = lambda build, number: new if build == "new" else 1.0
    status, [row] = jobs.run()
    assert (status, row["moved"], row["pairs"]) == (0, moved, 7)


@pytest.mark.parametrize(("build", "status"), [("base", 0), ("new", 1)])
def test_failing_benchmark_has_a_row_and_the_others_go_on(jobs, build, status):
    def time(of, number):  # allreduce has the first two jobs
        return compare.Failure(of, "no such function") if of == build and len(jobs.ran) < 2 else 1.0

    jobs.time = time
    found, rows = jobs.run("--only", "allreduce loops", "--rounds", 3)
    assert found == status
    assert [(row["benchmark"], row["moved"]) for row in rows] == [
        ("allreduce", f"fails with {build}"),
        ("loops", ""),
    ]
    assert rows[1]["pairs"] == 3
    assert len(jobs.ran) == 2 + 6


def test_nothing_compared_is_a_failure(jobs):
    jobs.time = lambda build, number: compare.Failure(build, "no such function")
    status, [row] = jobs.run()
    assert (status, row["moved"]) == (1, "fails with new")


def test_interrupted_command_continues_with_the_missing_pairs(jobs):
    jobs.time = lambda build, number: KeyboardInterrupt() if len(jobs.ran) == 5 else 1.0
    with pytest.raises(KeyboardInterrupt):
        jobs.run("--rounds", 4)
    jobs.time = lambda build, number: 1.0
    status, [row] = jobs.run("--rounds", 4)
    # Two pairs are complete. The job of the third one whose neighbour is missing is run again with it.
    assert (status, row["pairs"], len(jobs.ran)) == (0, 4, 4)
    assert jobs.run("--rounds", 4)[1] == [row]
    assert jobs.ran == []
    jobs.run("--rounds", 5)
    assert len(jobs.ran) == 2


def test_other_options_or_another_checkout_are_measured_anew(jobs):
    jobs.run("--rounds", 1)
    jobs.run("--rounds", 1, "--tiny")
    assert len(jobs.ran) == 2
    jobs.checkout = jobs.checkout._replace(name="new-dirty-1")
    jobs.run("--rounds", 1, "--tiny")
    assert len(jobs.ran) == 2


def test_results_of_a_checkout_that_changes_are_not_kept(jobs):
    def time(build, number):
        jobs.checkout = jobs.checkout._replace(name=f"new-dirty-{len(jobs.ran)}")
        return 1.0

    jobs.time = time
    with pytest.raises(SystemExit, match="the checkout has been changed"):
        jobs.run()
    assert not list(jobs.folder.glob("results/*/*.json"))


def test_unknown_benchmark_is_refused(jobs):
    with pytest.raises(SystemExit):
        jobs.run("--only", "allreduce nothing")


# ---- a job of its own ------------------------------------------------------------------------------------------------


def test_job_that_imports_another_package_fails(tmp_path):
    """The folder has no package, so that Python imports the installed one."""
    base = checkout.Checkout(tmp_path / "base", "base")
    both = compare.Comparison(base, base, tmp_path, is_tiny=True)
    part = compare.PARTS[0]
    with pytest.raises(compare.Failure, match=f"was imported from .* instead of {base.folder}"):
        both._job(part, part.tiny, "base")


# ---- checkouts -------------------------------------------------------------------------------------------------------

SETUP = """
import os, pathlib
assert "PYTHONPATH" not in os.environ
with open("builds", "a") as file:
    file.write("built\\n")
assert pathlib.Path("horoplug/__init__.py").read_text() != "broken"
"""


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    (root / "horoplug").mkdir(parents=True)
    (root / "setup.py").write_text(SETUP)
    (root / "horoplug/__init__.py").write_text("")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root, *words):
    command = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
    return subprocess.check_output(command, cwd=root, text=True, timeout=scaled(60)).strip()


def commit(root):
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "a change")
    return git(root, "rev-parse", "HEAD")[:12]


def test_changes_belong_to_the_name_of_a_checkout(repository):
    def name():
        return checkout.identified(repository).name

    clean = name()
    assert clean == git(repository, "rev-parse", "HEAD")[:12]
    (repository / "notes").write_text("changes no result")
    assert name() == clean
    names = set()
    for file in ("setup.py", "horoplug/new.py"):
        for text in ("1", "2"):
            (repository / file).write_text(text)
            names.add(name())
    assert len(names) == 4
    assert all(one.startswith(f"{clean}-dirty-") for one in names)
    assert commit(repository) == name() != clean


def test_folder_below_a_checkout_is_no_checkout(repository, tmp_path):
    for folder in (repository / "horoplug", tmp_path):
        with pytest.raises(SystemExit, match="git"):
            checkout.identified(folder)


def test_base_is_built_once(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(repository))
    first = git(repository, "rev-parse", "HEAD")
    (repository / "horoplug/__init__.py").write_text("later")
    later = commit(repository)
    out = tmp_path / "out"
    for _ in range(2):
        base = checkout.built(repository, first, out)
        assert base == (out / first[:12], first[:12])
        assert (base.folder / "horoplug/__init__.py").read_text() == ""
        assert (base.folder / "builds").read_text() == "built\n"
    assert checkout.built(repository, "HEAD", out).name == later


def test_base_that_cannot_be_built_is_tried_again(repository, tmp_path):
    (repository / "horoplug/__init__.py").write_text("broken")
    broken = commit(repository)
    for times in (1, 2):
        with pytest.raises(SystemExit, match=f"{broken} cannot be built"):
            checkout.built(repository, broken, tmp_path)
        assert (tmp_path / broken / "builds").read_text() == "built\n" * times


def test_unknown_commit_is_refused(repository, tmp_path):
    for name in ("nothing", "--all"):
        with pytest.raises(SystemExit, match="git rev-parse"):
            checkout.built(repository, name, tmp_path)
