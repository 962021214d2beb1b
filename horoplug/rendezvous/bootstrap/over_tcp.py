"""Meeting at an address: for processes that know each other's number and rank 0's host, and have no MPI.

Rank 0 serves the store on its host, at one of a few ports that follow from the job's name; the others try them in turn,
until a server proves that it knows the job's secret. Whatever else listens on such a port does no harm: neither side
says anything before the other has proved itself."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import time
from collections.abc import Sequence

from horoplug.base.config import Config
from horoplug.base.errors import AuthenticationError, RendezvousError, WrongSecretError
from horoplug.rendezvous.bootstrap.job_key import REMEDY, job_secret, key_file
from horoplug.rendezvous.bootstrap.launcher_environment import Launched, Place
from horoplug.rendezvous.network.addresses import addresses, own_address
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer

PORTS = 8  # of which one is free, almost certainly
_LOWEST, _HIGHEST = 10000, 32767  # above the well-known ones, below those that Linux gives away
_PATIENCE = (
    1.0  # seconds for one attempt, at first: whatever it is that listens there may never answer
)
_REFUSED_SECONDS = 10.0  # a server of another job may refuse us, but not for ever
_PAUSES = (0.01, 0.25)  # seconds between two rounds: first and longest

Address = tuple[str, int]


def ports(job: str) -> list[int]:
    """Where rank 0 of a job may serve, best first."""
    digest = hashlib.sha512(b"horoplug ports\0" + job.encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 4], "big") for i in range(0, len(digest), 4)]
    span = _HIGHEST - _LOWEST + 1
    return list(dict.fromkeys(_LOWEST + number % span for number in numbers))[:PORTS]


def where(config: Config, place: Place) -> tuple[list[str], list[int]]:
    """The hosts on one of which rank 0 serves, and the ports, best first."""
    port = config.rendezvous_port
    numbers = [port] if port is not None else ports(place.job)
    if config.rendezvous_addr is not None:
        return [config.rendezvous_addr], numbers
    return ["127.0.0.1"] if place.together else list(place.hosts), numbers


def meet_at(
    config: Config, launched: Launched, place: Place
) -> tuple[Address, bytes, StoreServer | None]:
    """The rendezvous's address and secret; on rank 0 also its server. Errors: those of :func:`.bootstrap.meet`."""
    secret = job_secret(config.secret_key, place.job)
    hosts, numbers = where(config, place)
    if launched.rank == 0:
        server = _serve(secret, hosts, numbers)
        return server.address, secret, server
    who = f"rank 0 of {launched.size} that {launched.launcher.name} has started"
    found = _find(secret, hosts, numbers, config.start_timeout, who, config.secret_key is None)
    return found, secret, None


def _resolve(host: str) -> list[str]:
    # Known to be this host for all ranks, so there is no better address.
    return [host] if host == "127.0.0.1" else addresses(host)


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


def _serve(secret: bytes, hosts: Sequence[str], numbers: Sequence[int]) -> StoreServer:
    for address in _own(hosts):
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


def _own(hosts: Sequence[str]) -> list[str]:
    """Addresses to try to listen on: those of the hosts, and the one of this host's, in case others come to it by
    another name or through a gateway."""
    found: list[str] = []
    for host in hosts:
        try:
            found += _resolve(host)
        except OSError:
            continue  # others may know it
    with contextlib.suppress(OSError):
        found.append(own_address())
    return list(dict.fromkeys(found))


# ---- the others ------------------------------------------------------------------------------------------------------


def _find(
    secret: bytes,
    hosts: Sequence[str],
    numbers: Sequence[int],
    timeout: float,
    who: str,
    key_is_from_file: bool,
) -> Address:
    """The address at which a server knows the secret."""
    began = time.monotonic()
    deadline = began + timeout
    pause, patience = _PAUSES[0], _PATIENCE
    refused: float | None = None
    while True:
        reasons: dict[str, None] = {}
        for host in hosts:
            try:
                places = [(address, port) for address in _resolve(host) for port in numbers]
            except OSError as error:
                reasons[f"{host} is unknown here ({error.strerror})"] = None
                continue
            for address, port in places:
                remaining = max(deadline - time.monotonic(), 0.01)
                try:
                    StoreClient.attempt(address, port, secret, min(patience, remaining)).close()
                    return address, port
                except WrongSecretError:
                    refused = refused or time.monotonic()
                except AuthenticationError as error:
                    reasons[str(error)] = None
                except OSError as error:
                    reasons[f"{address}: {error.strerror or error}"] = None
        now = time.monotonic()
        over = now + pause > deadline
        if refused is not None and (over or now > refused + _REFUSED_SECONDS):
            raise WrongSecretError(
                f"{who} knows another secret; {_about_secrets(key_is_from_file)}"
            )
        if over:
            raise RendezvousError(
                f"{who} is not found within {timeout:g} s on {' or '.join(hosts)}, ports {_list(numbers)}: "
                f"{'; '.join(reasons)}. If it is elsewhere, set HOROPLUG_GLOO_RENDEZVOUS_ADDR (and _PORT) for all ranks"
            )
        time.sleep(pause)
        pause, patience = min(2 * pause, _PAUSES[1]), 2 * patience


def _about_secrets(key_is_from_file: bool) -> str:
    if key_is_from_file:
        return f"if the hosts do not share {key_file()}, {REMEDY}"
    return "HOROPLUG_SECRET_KEY must be the same for all ranks"


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
