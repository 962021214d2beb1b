"""Files that are written under names that the user gives: only their owner reads them, and nobody can make a job write
to another file."""

import json
import os
import stat

import pytest

import horoplug.numpy as hvd
from horoplug.base.private_file import open_private_file
from horoplug.runner.output.output import RankOutput

pytest_plugins = ["tests.harness.jobs"]

OBJECTIONS = {
    "symlink": "it is a symbolic link; name the file itself",
    "dangling": "it is a symbolic link; name the file itself",
    "hardlink": "the file has a second name (a hard link); remove it first",
    "another_user": "it belongs to another user; choose another name",
    "folder": "Is a directory",
}
if os.geteuid() != 0:
    del OBJECTIONS["another_user"]


def make(folder, what):
    """A path that must not be written, and the file that must not change."""
    path, victim = folder / f"{what}.log", folder / f"{what}.victim"
    victim.write_text("untouched")
    victim.chmod(0o644)
    match what:
        case "symlink":
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to(folder / "nothing")
        case "hardlink":
            path.hardlink_to(victim)
        case "another_user":
            os.chown(victim, 65534, 65534)
            victim.rename(path)
            victim = path
        case "folder":
            path.mkdir()
    return path, victim


def check_victims(folder, victims):
    for victim in victims:
        assert victim.read_text() == "untouched"
        assert stat.S_IMODE(victim.stat().st_mode) == 0o644
    assert not (folder / "nothing").exists()


def written_by_a_rank(paths, readable):
    """The errors for ``paths``; then both files are written over ``readable``."""
    errors = {"timeline": {}, "autotune": {}}
    for what, path in paths.items():
        os.environ["HOROVOD_AUTOTUNE_LOG"] = str(path)
        with pytest.raises(ValueError, match=r"the autotuner") as caught:
            hvd.init()
        errors["autotune"][what] = str(caught.value)
    os.environ["HOROVOD_AUTOTUNE_LOG"] = str(readable[0])
    hvd.init()
    for what, path in paths.items():
        with pytest.raises(ValueError, match=r"the timeline") as caught:
            hvd.start_timeline(path)
        errors["timeline"][what] = str(caught.value)
    hvd.start_timeline(readable[1])
    hvd.allreduce([1.0], name="x")
    hvd.shutdown()
    return errors


def test_core_writes_only_private_files_of_its_user(pool, tmp_path):
    made = {what: make(tmp_path, what) for what in OBJECTIONS}
    paths = {what: path for what, (path, _) in made.items()}
    readable = tmp_path / "autotune.csv", tmp_path / "timeline.json"
    for path in readable:
        path.write_text("x" * 100_000)
        path.chmod(0o666)
    with pool.ranks(1, env={"HOROVOD_TIMELINE": "DYNAMIC"}, init=False) as job:
        (errors,) = job.run(written_by_a_rank, paths, readable)
    for kind, texts in errors.items():
        for what, text in texts.items():
            assert text.endswith(f"{paths[what]}: {OBJECTIONS[what]}"), (kind, what, text)
            assert "\n" not in text
    check_victims(tmp_path, [victim for _, victim in made.values()])
    assert {stat.S_IMODE(path.stat().st_mode) for path in readable} == {0o600}
    assert readable[0].read_text().startswith("process_set,setting,")
    assert "x" * 100 not in readable[0].read_text()
    assert json.loads(readable[1].read_text())


@pytest.mark.parametrize("what", OBJECTIONS)
def test_launcher_writes_only_private_files_of_its_user(tmp_path, what):
    path, victim = make(tmp_path, what)
    with pytest.raises(OSError, match=OBJECTIONS[what][:9]) as caught:
        open_private_file(path)
    assert caught.value.strerror == OBJECTIONS[what]
    assert caught.value.filename == str(path)
    check_victims(tmp_path, [victim])


def test_logs_of_ranks_replace_readable_files_and_follow_no_link(tmp_path):
    place = tmp_path / "rank.0"
    place.mkdir()
    for name in ("stdout", "stderr"):
        (place / name).write_text("old")
        (place / name).chmod(0o664)
    output = RankOutput(1, (open(os.devnull, "wb"),) * 2, folder=tmp_path)  # noqa: SIM115
    output.feed(0, 0, b"new\n")
    assert (place / "stdout").read_text() == "new\n"
    assert (place / "stderr").read_text() == ""
    assert {stat.S_IMODE(file.stat().st_mode) for file in place.iterdir()} == {0o600}
    (place / "stderr").rename(tmp_path / "victim")
    (place / "stderr").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        RankOutput(1, (None, None), folder=tmp_path)
