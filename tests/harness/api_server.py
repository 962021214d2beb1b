"""A stand-in for Kubernetes' API server, as far as Spark's driver uses it: it creates pods, lists and deletes them.

    with ApiServer(pods, start) as server:
        server.add("pods", {...})

Objects are stored as they come. A pod is started in :class:`~tests.harness.pods.Pods` as soon as the ConfigMaps that
its volumes name are there. A watch ends at once, without events, as the API allows: the client then lists again."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.harness.pods import NAMESPACE, Pod, Pods

Object = dict[str, Any]
PORT = 8001
NAME = "kubernetes.default.svc"


class ApiServer:
    """Serves the objects of one namespace by HTTP, until the end of the ``with`` block."""

    def __init__(self, pods: Pods, start: Callable[[Object], Pod]) -> None:
        """``start``: starts the pod of an object."""
        self._pods = pods
        self._start = start
        self._lock = threading.Lock()
        self._objects: dict[str, dict[str, Object]] = {}  # by kind, "pods" for example, and name
        self.started: dict[str, Pod] = {}
        """The pods that this server has started, by name, also those that have ended."""

    def __enter__(self) -> ApiServer:
        handler = type("Handler", (_Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = self._pods.listen(PORT, (NAME,))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, kind: str, given: Object) -> Object:
        """Create an object; a pod that is given with a status is only stored."""
        with self._lock:
            given["metadata"] |= {
                "uid": str(uuid.uuid4()),
                "namespace": NAMESPACE,
                "resourceVersion": "1",
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            self._objects.setdefault(kind, {})[given["metadata"]["name"]] = given
            self._start_pods()
            return self._current(kind, given)

    def get(self, kind: str, name: str) -> Object | None:
        with self._lock:
            found = self._objects.get(kind, {}).get(name)
            return None if found is None else self._current(kind, found)

    def select(self, kind: str, selectors: dict[str, str]) -> list[Object]:
        """The objects that fit a query's ``labelSelector`` and ``fieldSelector``."""
        with self._lock:
            items = [self._current(kind, each) for each in self._objects.get(kind, {}).values()]
        return [each for each in items if _fits(each, selectors)]

    def remove(self, kind: str, names: list[str]) -> None:
        with self._lock:
            for name in names:
                self._objects.get(kind, {}).pop(name, None)
                if kind == "pods" and (pod := self.started.get(name)):
                    pod.kill()

    def _start_pods(self) -> None:
        maps = self._objects.get("configmaps", {})
        for name, pod in self._objects.get("pods", {}).items():
            wanted = [each["configMap"]["name"] for each in _volumes(pod) if "configMap" in each]
            if name not in self.started and "status" not in pod and maps.keys() >= set(wanted):
                self._pods.config_maps |= {each: maps[each]["data"] for each in wanted}
                self.started[name] = self._start(pod)

    def _current(self, kind: str, given: Object) -> Object:
        """An object with the state of its pod."""
        if kind != "pods" or "status" in given:
            return given
        pod = self.started.get(given["metadata"]["name"])
        if pod is None:
            return given | {"status": {"phase": "Pending"}}
        container = {"name": given["spec"]["containers"][0]["name"], "ready": pod.is_running}
        if pod.is_running:
            phase, container["state"] = "Running", {"running": {}}
        else:
            code, _ = pod.wait()
            phase = "Failed" if code else "Succeeded"
            container["state"] = {"terminated": {"exitCode": code}}
        status = {"phase": phase, "podIP": pod.address, "containerStatuses": [container]}
        return given | {"status": status}


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _request(self) -> tuple[str, str, dict[str, str], Object]:
        """The kind of the objects, the name if there is one, the query, and the body."""
        address = urlsplit(self.path)
        kind, _, name = address.path.removeprefix(f"/api/v1/namespaces/{NAMESPACE}/").partition("/")
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return kind, name, query, json.loads(body or "{}")

    def _answer(self, content: Object, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        kind, name, query, _ = self._request()
        if "watch" in query:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif not name:
            items = self.api.select(kind, query)
            title = {"pods": "PodList"}.get(kind, "List")
            answer = {"apiVersion": "v1", "kind": title, "metadata": {"resourceVersion": "1"}}
            self._answer(answer | {"items": items})
        elif found := self.api.get(kind, name):
            self._answer(found)
        else:
            self._answer(_status("Failure", 404), 404)

    def do_POST(self) -> None:
        kind, _, _, body = self._request()
        self._answer(self.api.add(kind, body), 201)

    def do_DELETE(self) -> None:
        kind, name, query, _ = self._request()
        names = [each["metadata"]["name"] for each in self.api.select(kind, query)]
        self.api.remove(kind, [name] if name else names)
        self._answer(_status("Success", 200))


def _volumes(pod: Object) -> list[Object]:
    found: list[Object] = pod["spec"].get("volumes", [])
    return found


def _status(text: str, code: int) -> Object:
    return {"apiVersion": "v1", "kind": "Status", "status": text, "code": code}


def _fits(given: Object, query: dict[str, str]) -> bool:
    labels = given["metadata"].get("labels", {})
    fields = {
        "metadata.name": given["metadata"]["name"],
        "status.phase": given.get("status", {}).get("phase"),
    }
    for selector, have in (("labelSelector", labels), ("fieldSelector", fields)):
        for term in filter(None, query.get(selector, "").split(",")):
            name, _, text = term.replace("==", "=").rpartition(
                "="
            )  # name=text, name==text or name!=text
            if (have.get(name.rstrip("!")) == text) == name.endswith("!"):
                return False
    return True
