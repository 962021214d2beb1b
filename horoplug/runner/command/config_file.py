"""``--config-file``: the flags of a job in a YAML file, in Horovod's sections.

    controller: gloo
    params:
      fusion_threshold_mb: 64
    autotune:
      enabled: true
      log_file: tuning.csv

flags.py has the key of each flag. Errors are UsageErrors whose one-line message names the file and
the key."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from horoplug.runner.checks import UsageError

from .flags import Flag, all_flags

_TYPES: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read(path: Path) -> dict[str, Any]:
    """The flags that the file sets: values by the flags' attributes. Errors: UsageError."""
    try:
        import yaml
    except ImportError:
        raise UsageError("--config-file needs PyYAML: pip install pyyaml") from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a UTF-8 text file"
        raise UsageError(f"{path} cannot be read: {reason}") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UsageError(f"{path}{where} is not YAML: {' '.join(str(problem).split())}") from None
    try:
        return settings({} if content is None else content)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def settings(content: Any) -> dict[str, Any]:
    """The flags that a parsed file sets, as :func:`read`. Errors: ValueError with a one-line message that names the
    key."""
    if not isinstance(content, Mapping):
        raise ValueError("sections are wanted, such as params or autotune")
    known = {flag.config: flag for flag in all_flags() if flag.config}
    sections = {key.partition(".")[0] for key in known}
    found: dict[str, Any] = {}
    for section, entries in content.items():
        if section not in sections:
            raise ValueError(f"there is no section {section!r}; there are {_listed(sections)}")
        if section in known:
            pairs = {section: entries}
        elif entries is None:
            continue
        elif isinstance(entries, Mapping):
            pairs = {f"{section}.{key}": value for key, value in entries.items()}
        else:
            raise ValueError(f"{section}: settings are wanted, not {entries!r}")
        for key, value in pairs.items():
            if key not in known:
                others = {k.partition(".")[2] for k in known if k.startswith(f"{section}.")}
                raise ValueError(f"there is no {key}; {section} has {_listed(others)}")
            if value is not None:
                found[known[key].attribute] = _value(known[key], key, value)
    return found


def _value(flag: Flag, key: str, value: Any) -> Any:
    kind = flag.kind
    if not isinstance(value, kind.yaml) or (isinstance(value, bool) and bool not in kind.yaml):
        wanted = " or ".join(_TYPES[each] for each in kind.yaml)
        raise ValueError(f"{key}: {wanted} is wanted, not {value!r}")
    if isinstance(value, bool):
        return value
    try:
        parsed = kind.parse(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{key}: {error}") from None
    if kind.choices and parsed not in kind.choices:
        raise ValueError(f"{key}: one of {_listed(kind.choices)} is wanted, not {value!r}")
    return parsed


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))
