import logging
import os
import resource
import sys

from horoplug.rendezvous.connections import loop
from horoplug.rendezvous.connections.on_demand_connector import OnDemandConnector
from horoplug.rendezvous.connections.peer_connection import Identity
from horoplug.rendezvous.connections.sockets import tcp_listener
from horoplug.rendezvous.network.auth import Encryption
from horoplug.rendezvous.network.listener import Listener, bind
from horoplug.rendezvous.store.server import StoreServer
from horoplug.runner.network.probe import Probe

kind, files, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
secret, never = bytes(range(32)), 600.0
logging.basicConfig(format="%(message)s")
if threads:
    os.setgroups([])
    os.setuid(61000 + os.getpid() % 4000)
    resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def echo(stream):
    while True:
        stream.send(stream.receive(100))


def limit():
    if files:
        most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + files
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if kind == "listener":
    sock = bind("127.0.0.1")
    Listener([sock], secret, b"any", Encryption.OFF, 1, echo, never)
    limit()
    print(sock.getsockname()[1], flush=True)
elif kind == "probe":
    said = []
    Probe(secret, never, said.append).listen("127.0.0.1")
    limit()
    print(said[0]["listening"], flush=True)
elif kind == "store":
    server = StoreServer(secret, auth_seconds=never)
    limit()
    print(server.address[1], flush=True)
else:
    loop._INCOMING_SECONDS = never
    sock = tcp_listener("127.0.0.1", 1)
    connector = OnDemandConnector(
        Identity(0, 2, 0, secret), {1: ("127.0.0.1", 1)}, 1, -1.0, print, print
    )
    connector.listen(sock)
    ended = []
    connector.watch(0, lambda: ended.append(True))
    limit()
    print(sock.getsockname()[1], flush=True)
    while not ended:
        connector.run_once()
sys.stdin.read()
