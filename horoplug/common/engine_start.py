"""Starts an engine of the core with the settings of a process and its connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horoplug._native import Engine, EngineConfig, Tunable
from horoplug.base import log
from horoplug.base.config import Config
from horoplug.base.processors import engine_processors, starting_threads_on
from horoplug.base.variables import TUNABLE
from horoplug.common import gpu
from horoplug.rendezvous.connections.connected import PeerConnections


def start_engine(
    config: Config,
    connections: PeerConnections,
    process_sets: Sequence[Sequence[int]],
    **settings: Any,
) -> Engine:
    """Start the engine of this rank. Collective: returns when all ranks have started.

    The engine owns the descriptors of ``connections`` from then on, also if it fails to start. ``process_sets``: the
    ranks of the sets that will be added, to be compared with those of the other ranks. ``settings``: further ones of
    the core. Raises the core's Error."""
    cpus, local_rank = config.thread_affinity, connections.local_rank
    processors = engine_processors(connections.processors, connections.local_size)
    engine_config = EngineConfig(
        **connections.release(),
        **config.core,
        autotune_fixed=sum(Tunable[TUNABLE[name]] for name in config.autotune_fixed),
        gpu_algorithm=config.gpu_algorithm,
        local_rank=local_rank,
        progress_cpu=cpus[local_rank] if local_rank < len(cpus) else -1,
        process_sets=", ".join(map(str, process_sets)),
        gpu_files=gpu.files(),
        log_level=log.LEVELS.index(config.log_level),
        log=log.from_core,
        **settings,
    )
    with starting_threads_on(processors):
        return Engine(engine_config)
