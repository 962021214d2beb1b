import json
import os
import socket
import sys

from horoplug.base.config import Config
from horoplug.rendezvous.session import Rendezvous

config = Config.from_env()
with Rendezvous(config) as rendezvous:
    for generation in range(int(sys.argv[1])):
        connections = rendezvous.connect(generation)
        said = {}
        for rank, _, stream, _, doorbell in connections.peers:
            sock = socket.socket(fileno=stream)
            sock.settimeout(20)
            sock.sendall(str(config.rank).encode())
            if doorbell >= 0:
                os.eventfd_write(doorbell, 1)
            said[rank] = sock
        heard = {rank: sock.recv(10).decode() for rank, sock in said.items()}
        assert all(str(rank) == text for rank, text in heard.items()), heard
        for sock in said.values():
            sock.detach()
        last = connections
        connections.close()
print(
    json.dumps(
        {
            "rank": last.rank,
            "hosts": last.hosts,
            "local": [last.local_rank, last.local_size],
            "fds": len(os.listdir("/proc/self/fd")),
        }
    )
)
