"""The task of a scheduler's step, such as Slurm's ``srun``, that runs the agent of one node for the launcher (step.py).

It reads a line of JSON from its standard input: the job's secret, and the addresses of the launcher. It connects to the
launcher, sends the name of its node, and exchanges messages: a kind, and the bytes of the agent's pipes or, at the end,
the exit code of the agent's guard. The launcher sends the agent's source first, as through ssh (start/ssh.py).

The agent ends all processes if this process, or the connection, ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from horoplug.base.errors import AuthenticationError, ProtocolError
from horoplug.rendezvous.network import dial
from horoplug.rendezvous.network.libcrypto import libcrypto
from horoplug.rendezvous.network.messages import MessageStream

from .ssh import BOOTSTRAP

CONTEXT = b"agent"
DATA, ENDED = b"D", b"E"  # kinds of messages
CODE = struct.Struct("!i")
CHUNK = 1 << 16
MAX_MESSAGE = CHUNK + 1
_CONNECT_SECONDS = 10.0


def connect(addresses: Sequence[tuple[str, int]], secret: bytes, encrypt: bool) -> MessageStream:
    """Connect to all addresses at once; the first connection is used. Errors: SystemExit with a line for the user."""
    results: queue.SimpleQueue[dial.Connection | str] = queue.SimpleQueue()
    is_first = threading.Lock()

    def attempt(address: str, port: int) -> None:
        try:
            made = dial.attempt(address, port, secret, CONTEXT, _CONNECT_SECONDS, address, encrypt)
        except AuthenticationError:
            results.put(f"{address} (something else answers there)")
        except OSError as error:
            results.put(f"{address} ({(error.strerror or str(error)).lower()})")
        except Exception as error:
            results.put(f"{address} ({type(error).__name__}: {error})")
        else:
            if is_first.acquire(blocking=False):
                results.put(made)
            else:
                made[0].close()

    for address, port in addresses:
        threading.Thread(target=attempt, args=(address, port), daemon=True).start()
    failed = []
    deadline = time.monotonic() + 2 * _CONNECT_SECONDS  # the threads end before that
    for _ in addresses:
        try:
            result = results.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            failed.append(f"no answer within {2 * _CONNECT_SECONDS:g} s")
            break
        if not isinstance(result, str):
            return MessageStream(*result)
        failed.append(result)
    sys.exit(f"it does not reach horovodrun at any of its addresses: {', '.join(failed)}")


def exchange(stream: MessageStream, agent: subprocess.Popen[bytes]) -> int:
    """Exchange the bytes of the agent's pipes with the launcher until the agent has ended. Returns its exit code."""
    assert agent.stdin is not None
    assert agent.stdout is not None
    output = agent.stdout.fileno()

    def receive() -> None:
        assert agent.stdin is not None
        # A message that was changed ends the job, too.
        with agent.stdin, contextlib.suppress(OSError, ProtocolError):
            while True:
                agent.stdin.write(stream.receive(MAX_MESSAGE)[1:])

    threading.Thread(target=receive, daemon=True).start()
    with contextlib.suppress(OSError):
        while data := os.read(output, CHUNK):
            stream.send(DATA, data)
    agent.stdout.close()
    code = agent.wait()
    with contextlib.suppress(OSError):
        stream.send(ENDED, CODE.pack(code))
    return code


def main() -> int:
    """Run the agent of this node. Returns 0 unless it was lost."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Slurm signals all processes. The agent, which gets them as well, ends the ranks; its last frames are sent.
        signal.signal(number, lambda *_: None)
    told = json.loads(sys.stdin.buffer.readline())
    encrypt = bool(told["encrypt"])
    if encrypt:
        try:
            libcrypto()
        except ValueError:
            sys.exit(
                "OpenSSL's libcrypto, by which horovodrun encrypts its connection to this node, cannot be used here: "
                f"install it, or start the agents by ssh ({told['by_ssh']})"
            )
    addresses = [(str(address), int(port)) for address, port in told["addresses"]]
    stream = connect(addresses, bytes.fromhex(told["secret"]), encrypt)
    stream.send(os.environ.get(told["node_variable"], socket.gethostname()).encode())
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-u", "-c", BOOTSTRAP]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as agent:
        return exchange(stream, agent)


if __name__ == "__main__":
    sys.exit(main())
