"""The hooks of .pre-commit-config.yaml are the commands of ``make lint``."""

import re

import yaml

from tests.harness import ROOT


def without_options(command):
    """The words of a command that say what it checks; files and options may differ."""
    return " ".join(word for word in command.split() if not re.match(r"-|\$\(\w+_FILES\)", word))


def test_hooks_are_the_commands_of_make_lint():
    makefile = (ROOT / "Makefile").read_text()
    [recipe] = re.findall(r"^lint: \.venv/\.dev lint-types\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    lint = {"make lint-types"}
    lint |= {without_options(line.replace("$(BIN)", ".venv/bin")) for line in recipe.splitlines()}
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [without_options(hook["entry"]) for repo in repositories for hook in repo["hooks"]]
    assert sorted(hooks) == sorted(lint)
