"""Bootstrap over TCP within this process: how rank 0 chooses its address and the other ranks find rank 0.

launcher/test_launcher_environment_jobs.py starts whole jobs."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from horoplug.base.config import Config
from horoplug.rendezvous.bootstrap.job_key import job_secret
from horoplug.rendezvous.bootstrap.launcher_environment import recognise
from horoplug.rendezvous.bootstrap.over_tcp import bootstrap_over_tcp
from horoplug.rendezvous.errors import WrongSecretError
from horoplug.rendezvous.store.client import StoreClient
from horoplug.rendezvous.store.server import StoreServer
from tests.harness.limits import scaled
from tests.harness.starters import srun
from tests.harness.strangers import RefusingServer

KEY = os.urandom(32)
LONG = 40.0  # seconds; longer than any test here takes


def bootstrap(rank, *hosts, port=None, seconds=LONG):
    launched = recognise(srun(2)[rank])
    address = launched.bootstrap_address._replace(hosts=hosts, on_one_host=False)
    config = Config(secret_key=KEY, rendezvous_port=port, start_timeout=seconds)
    return bootstrap_over_tcp(config, launched, address)


def test_rank_0_skips_addresses_of_other_hosts():
    """The first host of an allocation may run no rank."""
    (address, _), _, server = bootstrap(0, "192.0.2.1", "nowhere.invalid")
    server.close()
    assert address != "192.0.2.1"


def test_different_secret_is_an_error_at_the_start_timeout():
    """A rejection does not prove that the secrets differ: the server of an earlier job, or a process without the
    secret, may have sent it."""
    began = time.monotonic()
    with (
        StoreServer(bytes(32), "127.0.0.1") as server,
        pytest.raises(WrongSecretError, match="HOROPLUG_SECRET_KEY must be the same") as caught,
    ):
        bootstrap(1, "127.0.0.1", port=server.address[1], seconds=0.5)
    assert 0.2 < time.monotonic() - began < LONG / 2
    assert "for 0.5 s" in str(caught.value)


def test_search_continues_when_an_unauthenticated_server_rejects_a_rank():
    """A process without the job's secret listens at rank 0's port. Rank 0 listens there when that process has ended."""
    job = recognise(srun(2)[1]).bootstrap_address.job
    with (
        RefusingServer(socket.AF_INET, ("127.0.0.1", 0)) as stranger,
        ThreadPoolExecutor(1) as pool,
    ):
        searching = pool.submit(bootstrap, 1, "127.0.0.1", port=stranger.address[1])
        assert stranger.refused.wait(scaled(20))
        stranger.close()
        with StoreServer(job_secret(KEY, job), *stranger.address):
            assert searching.result(20)[0] == stranger.address


def test_slow_server_is_given_more_time(monkeypatch):
    """The limit of an attempt doubles in every round."""
    given = []

    def attempt(address, port, secret, timeout):
        given.append(timeout)
        if len(given) < 4:
            raise TimeoutError
        return quick(address, port, secret, LONG)

    quick = StoreClient.attempt
    monkeypatch.setattr(StoreClient, "attempt", attempt)
    job = recognise(srun(2)[1]).bootstrap_address.job
    with StoreServer(job_secret(KEY, job), "127.0.0.1") as server:
        assert bootstrap(1, "127.0.0.1", port=server.address[1])[0] == server.address
    assert given == [1, 2, 4, 8]
