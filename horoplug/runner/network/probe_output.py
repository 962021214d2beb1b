"""What a probe (probe.py) sends, as its host's agent passes it on."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

from horoplug.runner.agent import agent


class ProbeError(Exception):
    """A probe has ended, or could not be started; the text tells why."""


class ProbeOutput:
    """What the probe of one host sends."""

    def __init__(self) -> None:
        self._inbox = bytearray()
        self._stderr = b""

    def feed(self, kind: bytes, payload: bytes) -> list[dict[str, Any]]:
        """Handle a frame about the probe. Returns the probe's messages. Errors: ProbeError."""
        if kind == agent.STDERR:
            self._stderr += payload
        elif kind == agent.NOT_STARTED:
            raise ProbeError(payload.decode(errors="replace"))
        elif kind == agent.ENDED:
            raise ProbeError(self._why_ended(*struct.unpack("!i", payload)))
        elif kind == agent.STDOUT:
            *lines, rest = (bytes(self._inbox) + payload).split(b"\n")
            self._inbox[:] = rest
            return [message for line in lines for message in _parse(line)]
        return []

    def _why_ended(self, code: int) -> str:
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else f"it ended with code {code}"
        if "No module named 'horoplug'" in last:
            return f"horoplug is not installed for the Python there ({last})"
        if "No module named horoplug." in last or "No module named 'horoplug." in last:
            return f"horoplug is older there than on this host ({last})"
        return f"horoplug does not work there: {last}"


def _parse(line: bytes) -> list[dict[str, Any]]:
    """The message on a line; none if it is not from the probe."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        return [message] if isinstance(message, dict) else []
    return []
