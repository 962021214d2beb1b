"""The logger of this package: ``logging.getLogger("horoplug")``, on stderr, with the rank before every line.

Levels are Horovod's (trace, debug, info, warning, error, fatal); the core uses their index as a number."""

from __future__ import annotations

import logging
import sys
import time

LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
TRACE = 5  # below logging.DEBUG (10), which has no name for it

_PYTHON_LEVELS = (
    TRACE,
    logging.DEBUG,
    logging.INFO,
    logging.WARNING,
    logging.ERROR,
    logging.CRITICAL,
)
_LETTERS = {TRACE: "T", 10: "D", 20: "I", 30: "W", 40: "E", 50: "F"}

logger = logging.getLogger("horoplug")
logging.addLevelName(TRACE, "TRACE")


class _Formatter(logging.Formatter):
    """``[2026-01-31 12:00:00.123456: W horoplug] [1]: text``; the time can be left out."""

    def __init__(self, rank: int | None, hide_time: bool) -> None:
        super().__init__()
        self._rank = "" if rank is None else f" [{rank}]"
        self._hide_time = hide_time

    def format(self, record: logging.LogRecord) -> str:
        letter = _LETTERS.get(record.levelno, record.levelname[:1])
        when = ""
        if not self._hide_time:
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
            when = f"{clock}.{int(record.created % 1 * 1e6):06d}: "
        text = f"[{when}{letter} horoplug]{self._rank}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Writes to the current ``sys.stderr``, so that a redirected stderr is respected."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(
    level: str = "warning", *, hide_time: bool = False, rank: int | None = None
) -> logging.Logger:
    """Set up the package's logger; may be called again, for another rank or level.

    ``level`` is one of :data:`LEVELS`. Other loggers, including the root logger, do not change."""
    logger.handlers = [h for h in logger.handlers if not isinstance(h, _StderrHandler)]
    handler = _StderrHandler()
    handler.setFormatter(_Formatter(rank, hide_time))
    logger.addHandler(handler)
    logger.setLevel(_PYTHON_LEVELS[LEVELS.index(level)])
    logger.propagate = False
    return logger


def from_core(level: int, text: str) -> None:
    """The core's log callback: ``level`` is an index into :data:`LEVELS`."""
    logger.log(_PYTHON_LEVELS[min(max(level, 0), len(LEVELS) - 1)], "%s", text)
