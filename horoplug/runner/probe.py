"""What a host is asked before ranks start there: which horoplug it has, and whom it reaches over the network.

``python -m horoplug.runner.probe`` is run by the agent, in the environment of the ranks. It talks with the launcher in
lines of JSON (preflight.py has the other side):

1. from the launcher: the job's secret, addresses at which it listens, and names of interfaces, if they are prescribed;
   to it: version and, one by one, whether each of the addresses was reached, and from which address of this host;
2. from the launcher: an address of this host; to it: the port on which the probe listens there;
3. from the launcher: where the other hosts listen; to it: whether each was reached.

Every connection is authenticated with the job's secret, so that an address that other machines have, too, such as that
of a container's bridge, is not taken for the launcher's. The probe ends with its standard input."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import horoplug
from horoplug.base.errors import AuthenticationError
from horoplug.rendezvous.network.auth import Role, authenticate
from horoplug.rendezvous.network.interfaces import select_interfaces
from horoplug.rendezvous.store import protocol

PEER_CONTEXT = b"probe"
_STRANGERS = 32  # connections that may authenticate at the same time


class Probe:
    """One conversation."""

    def __init__(
        self, secret: bytes, seconds: float, say: Callable[[dict[str, Any]], None]
    ) -> None:
        """``seconds``: how long a connection may take."""
        self._secret = secret
        self._seconds = seconds
        self._say = say
        self._room = threading.Semaphore(_STRANGERS)

    def hello(self, interfaces: list[str]) -> None:
        """Say who this is."""
        answer: dict[str, Any] = {"version": horoplug.__version__}
        if interfaces:
            try:
                found = select_interfaces(interfaces)[0]
                answer |= {"interface": found.name, "address": found.address}
            except ValueError as error:
                answer["error"] = str(error)
        self._say({"hello": answer})

    def reach(self, kind: str, context: bytes, number: int, address: str, port: int) -> None:
        """Connect, in a thread of its own, and say how it went."""

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

        threading.Thread(target=run, daemon=True).start()

    def _connect(self, context: bytes, address: str, port: int) -> str:
        """This host's address on the way to another."""
        with socket.create_connection((address, port), timeout=self._seconds) as sock:
            authenticate(sock, self._secret, Role.CLIENT, context, self._seconds, address)
            return str(sock.getsockname()[0])

    def listen(self, address: str) -> None:
        """Let the other hosts' probes connect."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, 0), family=family, backlog=128)
        except OSError as error:
            self._say({"failed": f"cannot listen on {address}: {error.strerror}"})
            return
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        self._say({"listening": listener.getsockname()[1]})

    def _serve(self, listener: socket.socket) -> None:
        while True:
            self._room.acquire()
            sock, _ = listener.accept()
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(AuthenticationError):
                authenticate(sock, self._secret, Role.SERVER, PEER_CONTEXT, self._seconds, "a host")
        finally:
            self._room.release()


def main() -> None:
    """Talk with the launcher over standard input and output."""
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
