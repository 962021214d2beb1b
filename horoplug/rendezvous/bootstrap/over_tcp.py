"""Bootstrap over TCP, for processes that know their ranks and rank 0's host, and have no MPI.

Rank 0 serves the store on its host, at one of a few ports. These are derived from the job's secret, so that nobody else
can predict them. The other ranks try the ports in turn until a server proves that it knows the secret. A foreign
process that listens on such a port only costs time: the handshake reveals nothing to it, and ranks ignore refusals by
processes that have not proved to know the secret, until the start timeout."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import time
from collections.abc import Sequence

from horoplug.base.config import Config
from horoplug.base.errors import AuthenticationError, RendezvousError, WrongSecretError
from horoplug.rendezvous.bootstrap.job_key import REMEDY, job_secret, key_file
from horoplug.rendezvous.bootstrap.launcher_environment import BootstrapAddress, LaunchedProcess
from horoplug.rendezvous.network.addresses import addresses, loopback, own_address
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer

PORTS = 8  # enough that one of them is free
_LOWEST, _HIGHEST = 10000, 32767  # above the well-known ports, below Linux's ephemeral ones
_ATTEMPT_SECONDS = (
    1.0  # limit of a first attempt: a foreign listener may never answer; doubled every round
)
_PAUSES = (0.01, 0.25)  # seconds between two rounds: first and longest

Address = tuple[str, int]


def ports(secret: bytes) -> list[int]:
    """The ports at which rank 0 of the job with this secret may serve, in order of preference."""
    digest = hmac.new(secret, b"horoplug ports", hashlib.sha512).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, len(digest), 4)]
    span = _HIGHEST - _LOWEST + 1
    return list(dict.fromkeys(_LOWEST + number % span for number in numbers))[:PORTS]


def candidate_hosts(config: Config, where: BootstrapAddress) -> list[str]:
    """The hosts on one of which rank 0 serves, in order of preference."""
    if config.rendezvous_addr is not None:
        return [config.rendezvous_addr]
    return [loopback()] if where.on_one_host else list(where.hosts)


def bootstrap_over_tcp(
    config: Config, launched: LaunchedProcess, where: BootstrapAddress
) -> tuple[Address, bytes, StoreServer | None]:
    """The address and the secret of the rendezvous, and on rank 0 its server. Errors: those of
    :func:`.bootstrap.bootstrap`."""
    secret = job_secret(config.secret_key, where.job)
    hosts = candidate_hosts(config, where)
    port = config.rendezvous_port
    numbers = [port] if port is not None else ports(secret)
    if launched.rank == 0:
        server = _serve(secret, hosts, numbers)
        return server.address, secret, server
    who = f"rank 0 of {launched.size} that {launched.launcher.name} has started"
    found = _find(secret, hosts, numbers, config.start_timeout, who, config.secret_key is None)
    return found, secret, None


def _resolve(host: str) -> list[str]:
    # These mean that all ranks are on this host: the loopback address must not be replaced.
    return [host] if host in ("127.0.0.1", "::1") else addresses(host)


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


def _serve(secret: bytes, hosts: Sequence[str], numbers: Sequence[int]) -> StoreServer:
    for address in _listen_addresses(hosts):
        for port in numbers:
            try:
                return StoreServer(secret, address, port)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    break  # another host's address
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise ValueError(
                        f"rank 0 cannot serve the rendezvous at {address}:{port}: {error.strerror}"
                    ) from None
        else:
            raise ValueError(
                f"rank 0 cannot serve the rendezvous at {address}: ports {_list(numbers)} are all in use; set "
                "HOROPLUG_GLOO_RENDEZVOUS_PORT to one that is free, the same for all ranks"
            )
    raise ValueError(
        f"rank 0 is not on {' or '.join(hosts)}, where the others will look for it, and has no address of its own"
    )


def _listen_addresses(hosts: Sequence[str]) -> list[str]:
    """Addresses to try to listen on: those of ``hosts``, then those of this host, because other ranks may reach it
    under another name or through a gateway."""
    found: list[str] = []
    for host in hosts:
        try:
            found += _resolve(host)
        except OSError:
            continue  # other ranks may be able to resolve it
    with contextlib.suppress(OSError):
        found.append(own_address())
    return list(dict.fromkeys(found))


# ---- the other ranks -------------------------------------------------------------------------------------------------


def _find(
    secret: bytes,
    hosts: Sequence[str],
    numbers: Sequence[int],
    timeout: float,
    who: str,
    key_is_from_file: bool,
) -> Address:
    """The address of a server that knows the secret.

    Errors at the deadline: WrongSecretError if a server refused this process, otherwise RendezvousError."""
    began = time.monotonic()
    deadline = began + timeout
    pause, attempt_seconds = _PAUSES[0], _ATTEMPT_SECONDS
    refused = False
    while True:
        reasons: dict[str, None] = {}
        for host in hosts:
            try:
                endpoints = [(address, port) for address in _resolve(host) for port in numbers]
            except OSError as error:
                reasons[f"{host} is unknown here ({error.strerror})"] = None
                continue
            for address, port in endpoints:
                remaining = max(deadline - time.monotonic(), 0.01)
                try:
                    StoreClient.attempt(
                        address, port, secret, min(attempt_seconds, remaining)
                    ).close()
                    return address, port
                except WrongSecretError:
                    refused = True
                except AuthenticationError as error:
                    reasons[str(error)] = None
                except OSError as error:
                    reasons[f"{address}: {error.strerror or error}"] = None
        if time.monotonic() + pause > deadline:
            where, hint = (
                f"{' or '.join(hosts)}, ports {_list(numbers)}",
                _secret_hint(key_is_from_file),
            )
            if refused:
                raise WrongSecretError(
                    f"{who} knows another secret, or something else answers on {where}, for {timeout:g} s; {hint}"
                )
            raise RendezvousError(
                f"{who} is not found within {timeout:g} s on {where}: {'; '.join(reasons)}. If it is elsewhere, set "
                f"HOROPLUG_GLOO_RENDEZVOUS_ADDR (and _PORT) for all ranks; the ports follow from the secret: {hint}"
            )
        time.sleep(pause)
        pause, attempt_seconds = min(2 * pause, _PAUSES[1]), 2 * attempt_seconds


def _secret_hint(key_is_from_file: bool) -> str:
    if key_is_from_file:
        return f"if the hosts do not share {key_file()}, {REMEDY}"
    return "HOROPLUG_SECRET_KEY must be the same for all ranks"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
