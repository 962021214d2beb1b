"""Hooks of MkDocs for the documentation site (``mkdocs.yml``).

The sources are written for GitHub and for the site alike. On the site

- the files of ``ROOT_PAGES`` appear as pages beside those of ``docs/``, README.md as the first page;
- a link to another file of the repository, which the site does not have, becomes the file's path;
- words after the language of a code block, which tell ``tests/project/test_docs.py`` how to run it, are left out.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# File of the repository: page of the site.
ROOT_PAGES = {
    "README.md": "index.md",
    **{
        name: name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
    },
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    folder = "" if source in ROOT_PAGES.values() else posixpath.dirname(f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups(default="")
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            raise PluginError(f"{source}: there is no {target} to link to")
        if path in ROOT_PAGES:
            on_site = ROOT_PAGES[path]
        elif path.startswith("docs/"):
            on_site = path.removeprefix("docs/")
        else:
            return text if text.startswith("`") else f"{text} (`{path}`)"
        relative = os.path.relpath(on_site, posixpath.dirname(source) or ".")
        return f"{image}[{text}]({relative}{anchor})"

    markdown = re.sub(r"^```(\w+) [^\n]*$", r"```\1", markdown, flags=re.MULTILINE)
    return LINK.sub(link, markdown)
