"""Extension of griffe for the documentation site: docstrings as Markdown.

Docstrings are written for ``help()``: parameters are lines such as ``name: what it is``, and cross-references are
Sphinx roles. On the site, the parameters become a list and the roles become code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

PARAMETER = re.compile(r"^(`{0,2}\*{0,2}\w+`{0,2}(?:, `{0,2}\*{0,2}\w+`{0,2})*): (?=\S)")
ROLE = re.compile(r":(?:func|class|mod|meth|data|exc):`~?([^`]+)`")


def markdown(text: str) -> str:
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
