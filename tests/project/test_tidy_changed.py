"""What scripts/tidy_changed.py checks, for changes in a temporary git repository."""

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import tidy_changed

from tests.harness.limits import scaled

FILES = {
    "csrc/base/a.h": "int a();\n",
    "csrc/base/a.cc": '#include "base/a.h"\n',
    "csrc/base/kinds.def": "KIND(x)\n",
    "csrc/engine/b.h": '#include "base/a.h"\n#include "base/kinds.def"\n',
    "csrc/engine/b.cc": '#include "engine/b.h"\n',
    "csrc/engine/c.cc": '#include "base/a.h"\n',
    "csrc/tests/fuzz/fuzz.cc": '#include "base/a.h"\n',  # has no compile command
}


class Repository:
    def __init__(self, root):
        self.root = root
        self.commits = 0
        self.git("init", "-q", "-b", "main")
        for name, text in FILES.items():
            self.write(name, text)
        self.first = self.commit()
        commands = [{"file": str(root / name)} for name in FILES if name.endswith(".cc")]
        build = root / tidy_changed.BUILD
        build.mkdir(parents=True)
        (build / "compile_commands.json").write_text(
            json.dumps([one for one in commands if "fuzz" not in one["file"]])
        )
        (root / ".git/info/exclude").write_text("/build/\n")

    def git(self, *arguments):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        done = subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True, timeout=scaled(60)
        )
        return done.stdout.strip()

    def write(self, name, text):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def edit(self, name, lines):
        self.write(name, (self.root / name).read_text() + "// more\n" * lines)

    def commit(self):
        self.git("add", "-A")
        self.commits += 1  # equal commits of one second would be one
        self.git("commit", "-q", "--allow-empty", "-m", f"change {self.commits}")
        return self.git("rev-parse", "HEAD")

    def base(self, named=""):
        return tidy_changed.find_base(self.root, named)

    def chosen(self, base=None):
        return tidy_changed.choose(
            tidy_changed.find_changes(self.root, base or self.first),
            tidy_changed.find_units(self.root),
            tidy_changed.find_includers(
                self.root, [str(p.relative_to(self.root)) for p in self.root.rglob("csrc/**/*.*")]
            ),
        )


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


def test_nothing_is_checked_without_a_change(repository):
    assert repository.chosen() == []


def test_changed_files_are_checked_most_changed_first(repository):
    repository.edit("csrc/base/a.cc", 1)
    repository.edit("csrc/engine/c.cc", 3)
    repository.commit()
    assert repository.chosen() == ["csrc/engine/c.cc", "csrc/base/a.cc"]


def test_header_is_covered_by_its_namesake_first_and_then_by_all_direct_includers(repository):
    repository.edit("csrc/base/a.h", 5)
    repository.edit("csrc/engine/b.cc", 1)
    repository.commit()
    assert repository.chosen() == ["csrc/base/a.cc", "csrc/engine/b.cc", "csrc/engine/c.cc"]


def test_header_is_covered_by_an_edited_file_if_there_is_one(repository):
    repository.edit("csrc/base/a.h", 5)
    repository.edit("csrc/engine/c.cc", 1)
    repository.commit()
    assert repository.chosen() == ["csrc/engine/c.cc", "csrc/base/a.cc"]


def test_file_that_only_headers_include_is_covered_through_them(repository):
    repository.edit("csrc/base/kinds.def", 1)
    repository.commit()
    assert repository.chosen() == ["csrc/engine/b.cc"]


def test_uncommitted_and_untracked_files_count(repository):
    repository.edit("csrc/base/a.cc", 1)
    repository.write("csrc/engine/new.h", "int n();\n")
    repository.write("csrc/engine/c.cc", '#include "new.h"\n')
    assert repository.chosen() == ["csrc/engine/c.cc", "csrc/base/a.cc"]


def test_deleted_moved_and_other_files_do_not_count(repository):
    repository.git("rm", "-q", "csrc/engine/c.cc")
    repository.git("mv", "csrc/base/kinds.def", "csrc/engine/kinds.def")
    repository.edit("csrc/tests/fuzz/fuzz.cc", 1)
    repository.write("README.md", "text\n")
    repository.commit()
    assert repository.chosen() == []


def test_base_of_a_branch_is_its_merge_base_with_main(repository):
    repository.git("checkout", "-q", "-b", "topic")
    repository.commit()
    repository.git("checkout", "-q", "main")
    repository.commit()
    repository.git("checkout", "-q", "topic")
    assert repository.base() == repository.first
    repository.git("update-ref", "refs/remotes/origin/main", "topic~1")
    assert repository.base() == repository.first


def test_base_on_main_is_a_number_of_commits_back(repository):
    assert repository.base() == tidy_changed.EMPTY_TREE
    assert set(repository.chosen(repository.base())) == tidy_changed.find_units(repository.root)
    commits = [repository.commit() for _ in range(tidy_changed.COMMITS + 1)]
    assert repository.base() == commits[0]
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert repository.base() == commits[0]
    repository.git("checkout", "-q", "--detach")
    assert repository.base() == commits[0]


def test_named_base_is_used(repository):
    second = repository.commit()
    repository.commit()
    assert repository.base("HEAD~1") == second
    with pytest.raises(subprocess.CalledProcessError):
        repository.base("no-such-commit")


def test_unchecked_files_are_counted(repository, monkeypatch):
    tool = repository.root / ".venv/bin/clang-tidy"
    repository.write(".venv/bin/clang-tidy", '#!/bin/sh\ncase "$4" in *a.cc) exit 1;; esac\n')
    tool.chmod(0o755)
    units = sorted(tidy_changed.find_units(repository.root))
    assert tidy_changed.check(repository.root, units, 60) == (1, 0)
    assert tidy_changed.check(repository.root, units, 0) == (0, len(units))
    tool.write_text("#!/bin/sh\nsleep 60; true\n")
    monkeypatch.setattr(tidy_changed, "GRACE", 0)
    assert tidy_changed.check(repository.root, units[:1], 0.5) == (0, 1)
