"""Extension of griffe for the documentation site: docstrings as Markdown.

Docstrings are written for ``help()``: parameters are lines such as ``name: what it is``, cross-references are Sphinx
roles, and examples are indented. On the site, the parameters become a list, the roles become code, and examples are
highlighted.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

PARAMETER = re.compile(r"^(`{0,2}\*{0,2}\w+`{0,2}(?:, `{0,2}\*{0,2}\w+`{0,2})*): (?=\S)")
ROLE = re.compile(r":(?:func|class|mod|meth|data|exc):`~?([^`]+)`")
EXAMPLE = re.compile(r"^(Example\b.*:\n\n)((?: {4}.*\n|\n)+)", re.MULTILINE)


def markdown(text: str) -> str:
    parts = EXAMPLE.split(f"{text}\n")  # text, then heading, code and text for each example
    for i, part in enumerate(parts):
        if i % 3 == 2:
            parts[i] = f"```python\n{textwrap.dedent(part).strip()}\n```\n\n"
        else:
            parts[i] = prose(part)
    return "".join(parts).strip()


def prose(text: str) -> str:
    lines: list[str] = []
    for line in ROLE.sub(r"`\1`", text).split("\n"):
        if match := PARAMETER.match(line):
            if lines and lines[-1] and not lines[-1].startswith(("- ", "    ")):
                lines.append("")
            names = match[1].replace("`", "").replace("*", r"\*")
            line = f"- **{names}**: {line[match.end() :]}"
        lines.append(line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """A stub has no function beside its overloads, so griffe would leave it out: the first one stands for it."""
        for name, overloads in mod.overloads.items():
            if name not in mod.members:
                function, *others = overloads
                function.overloads = others
                mod.set_member(name, function)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
