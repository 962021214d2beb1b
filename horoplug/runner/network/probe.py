"""The probe of a host, run before ranks start there: which horoplug it has, and which hosts it reaches.

The agent runs ``python -m horoplug.runner.network.probe`` in the environment of the ranks. The probe exchanges lines
of JSON with the launcher (preflight.py is the other side):

1. launcher: the job's secret, the addresses at which the launcher listens, and the names of the interfaces to use;
   probe: its version and, one by one, whether it reached each address, and from which address of this host;
2. launcher: an address of this host; probe: the port on which it listens there;
3. launcher: where the other hosts' probes listen; probe: whether it reached each of them.

Every connection is authenticated with the job's secret. An address that another machine has, too, such as that of a
container bridge, is therefore not mistaken for the launcher's. The probe ends when its standard input ends."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import horoplug
from horoplug.base import threads
from horoplug.base.errors import AuthenticationError
from horoplug.rendezvous.network.auth import Encryption, Role, authenticate
from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.store import protocol

PEER_CONTEXT = b"probe"
_HOSTS = 128  # that may connect at once; further ones wait


class Probe:
    """One conversation with the launcher."""

    def __init__(
        self, secret: bytes, seconds: float, say: Callable[[dict[str, Any]], None]
    ) -> None:
        """``seconds``: limit for each connection; ``say``: sends a message to the launcher, from any thread."""
        self._secret = secret
        self._seconds = seconds
        self._say = say

    def hello(self, interfaces: list[str]) -> None:
        """Report the version, and the interface to use."""
        answer: dict[str, Any] = {"version": horoplug.__version__}
        if interfaces:
            try:
                found = select_interfaces(interfaces)[0]
                answer |= {"interface": found.name, "address": found.address}
            except ValueError as error:
                answer["error"] = str(error)
        self._say({"hello": answer})

    def reach(self, kind: str, context: bytes, number: int, address: str, port: int) -> None:
        """Try to connect, in a new thread, and report the result. ``kind``: "launcher" or "peer"."""

        def run() -> None:
            own, reason = None, None
            try:
                own = self._connect(context, address, port)
            except AuthenticationError:
                reason = "something else answers there"
            except TimeoutError:
                reason = f"no answer within {self._seconds:.3g} s"
            except OSError as error:
                reason = (error.strerror or str(error)).lower()
            self._say({kind: {"number": number, "own": own, "reason": reason}})

        try:
            threads.start(run)
        except OSError as error:
            self._say({kind: {"number": number, "own": None, "reason": error.strerror}})

    def _connect(self, context: bytes, address: str, port: int) -> str:
        """Connect and authenticate. Returns this host's address of the connection."""
        with socket.create_connection((address, port), timeout=self._seconds) as sock:
            authenticate(sock, self._secret, Role.CLIENT, context, self._seconds, address)
            return str(sock.getsockname()[0])

    def listen(self, address: str) -> None:
        """Listen for the other hosts' probes, and report the port."""
        try:
            listener = bind(address)
            port = listener.getsockname()[1]
            # Whoever has authenticated has seen what it wanted to know.
            Listener(
                *([listener], self._secret, PEER_CONTEXT, Encryption.OFF, _HOSTS, lambda _: None),
                auth_seconds=self._seconds,
            )
        except OSError as error:
            self._say({"failed": f"cannot listen on {address}: {error.strerror}"})
            return
        self._say({"listening": port})


def main() -> None:
    """Exchange messages with the launcher over stdin and stdout, until stdin ends."""
    lock = threading.Lock()

    def say(message: dict[str, Any]) -> None:
        with lock:
            print(json.dumps(message), flush=True)

    first = json.loads(sys.stdin.readline() or "null")
    if first is None:
        return
    probe = Probe(bytes.fromhex(first["secret"]), first["seconds"], say)
    probe.hello(first["interfaces"])
    for number, (address, port) in enumerate(first["candidates"]):
        probe.reach("launcher", protocol.AUTH_CONTEXT, number, address, port)
    for line in sys.stdin:
        message = json.loads(line)
        if "listen" in message:
            probe.listen(message["listen"])
        for number, address, port in message.get("peers", ()):
            probe.reach("peer", PEER_CONTEXT, number, address, port)


if __name__ == "__main__":
    main()
