"""Where the workers of a :class:`horoplug.ray.RayExecutor` run: in a placement group of Ray."""

from __future__ import annotations

import contextlib
import time
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import (
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horoplug.ray import cluster


class Layout(NamedTuple):
    """How many workers there are, and what each needs. ``hosts``: on how many nodes, equally many on each; None: on
    any."""

    workers: int
    needed: dict[str, float]
    hosts: int | None = None

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What the placement group reserves: for each worker, or for each host."""
        if self.hosts is None:
            return [dict(self.needed)] * self.workers
        each = self.workers // self.hosts
        return [{name: number * each for name, number in self.needed.items()}] * self.hosts

    def __str__(self) -> str:
        what = f"{self.workers} workers with {cluster.describe_resources(self.needed)} each"
        return what if self.hosts is None else f"{what} on {self.hosts} nodes"


class PlacementError(RuntimeError, TimeoutError):
    """The cluster does not have room for the workers, now or in time; the text is one line that says what it has.
    Horovod raises TimeoutError."""


class Placement:
    """Reserves room for workers, and says how an actor gets it. It is released by :meth:`close`."""

    def __init__(
        self, layout: Layout, *, use_current: bool, seconds: float, autoscaling: bool
    ) -> None:
        """``use_current``: use the placement group that this process is in, if there is one; ``seconds``: how long
        to wait until there is room; ``autoscaling``: wait also if the cluster is too small, because it can grow.

        Errors: PlacementError."""
        self._layout = layout
        self._owned = None
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        current = get_current_placement_group() if use_current else None
        if current is not None:
            self._bundles = self._places_in(current)
            self._group = current
            return
        if not autoscaling:
            self._check_size()
        else:
            from ray.autoscaler.sdk import request_resources

            request_resources(bundles=layout.bundles)
        strategy = "PACK" if layout.hosts is None else "STRICT_SPREAD"
        self._group = self._owned = placement_group(layout.bundles, strategy=strategy)
        each = 1 if layout.hosts is None else layout.workers // layout.hosts
        self._bundles = [number for number in range(len(layout.bundles)) for _ in range(each)]
        try:
            if not self._group.wait(timeout_seconds=seconds):
                raise self._late()
        except BaseException:
            self.close()
            raise
        finally:
            if autoscaling:
                request_resources(
                    bundles=[]
                )  # the placement group has what it needs, or nobody needs it

    def options(self, worker: int) -> dict[str, Any]:
        """The options of a worker's actor."""
        needed = dict(self._layout.needed)
        return {
            "num_cpus": needed.pop("CPU", 0),
            "num_gpus": needed.pop("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group,
                placement_group_bundle_index=self._bundles[worker],
                placement_group_capture_child_tasks=False,
            ),
        }

    def wait(self, references: list[Any]) -> list[Any]:
        """The results of the first call of each actor. Errors: PlacementError if one does not start in time; those of
        Ray."""
        remaining = max(self._deadline - time.monotonic(), 1.0)
        ready, late = ray.wait(references, num_returns=len(references), timeout=remaining)
        if late:
            for reference in ready:
                ray.get(reference)  # an actor that cannot start is the better reason
            raise self._late(len(ready))
        return list(ray.get(references))

    def close(self) -> None:
        """Release the room."""
        group, self._owned = self._owned, None
        if group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(group)

    def _check_size(self) -> None:
        """Raise PlacementError if the cluster is too small even when nothing else runs."""
        bundle = self._layout.bundles[0]
        rooms = [cluster.places(node["Resources"], bundle) for node in cluster.live_nodes()]
        if self._layout.hosts is None:
            enough = sum(rooms) >= self._layout.workers
        else:
            enough = sum(room > 0 for room in rooms) >= self._layout.hosts
        if not enough:
            raise PlacementError(
                f"there is no room for {self._layout}: the cluster has {self._cluster()}; start fewer workers, or let "
                "the cluster grow with create_settings(autoscaling=True)"
            )

    def _places_in(self, group: Any) -> list[int]:
        """The bundle for each worker."""
        found = []
        for number, bundle in enumerate(group.bundle_specs):
            found += [number] * cluster.places(bundle, self._layout.needed)
        if len(found) < self._layout.workers:
            raise PlacementError(
                f"there is no room for {self._layout} in the current placement group, which has {group.bundle_specs}; "
                "make it larger, or set use_current_placement_group=False"
            )
        # The caller itself is usually in the first bundle.
        return found[len(found) - self._layout.workers :]

    def _late(self, started: int = 0) -> PlacementError:
        return PlacementError(
            f"there was no room for {self._layout} within {self._seconds:g} s"
            f"{f', {started} have started' if started else ''}: the cluster has {self._cluster()}; end what else uses "
            "it, or wait longer with create_settings(placement_group_timeout_s=...)"
        )

    def _cluster(self) -> str:
        return cluster.describe_cluster(self._layout.needed)
