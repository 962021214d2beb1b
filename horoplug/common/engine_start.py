"""Starts an engine of the core with the settings of a process and its connections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horoplug._native import Engine, EngineConfig
from horoplug.base import log
from horoplug.base.config import Config
from horoplug.base.processors import engine_processors, starting_threads_on
from horoplug.common import gpu
from horoplug.rendezvous.connections.connected import PeerConnections


def start_engine(
    config: Config,
    connections: PeerConnections,
    process_sets: Sequence[Sequence[int]],
    *,
    transfers_outlive_ranks: bool = False,
) -> Engine:
    """Start the engine of this rank. Collective: returns when all ranks have started.

    The engine owns the descriptors of ``connections`` from then on, also if it fails to start. ``process_sets``: the
    ranks of the sets that will be added, to be compared with those of the other ranks. ``transfers_outlive_ranks``:
    sends and recvs between the other ranks go on when a rank leaves. Raises the core's Error."""
    cpus, local_rank = config.thread_affinity, connections.local_rank
    processors = engine_processors(connections.processors, connections.local_size)
    tuning = zip(
        (
            "autotune",
            "autotune_fixed",
            "autotune_warmup",
            "autotune_steps",
            "autotune_samples",
            "autotune_log",
        ),
        config.core_autotune,
        strict=True,
    )
    settings = EngineConfig(
        **connections.release(),
        **dict[str, Any](tuning),
        local_rank=local_rank,
        gpu_files=gpu.files(),
        fusion_threshold=config.fusion_threshold,
        cache_capacity=config.cache_capacity,
        separate_groups=config.disable_group_fusion,
        process_sets=", ".join(map(str, process_sets)),
        transfers_outlive_ranks=transfers_outlive_ranks,
        plan_after=config.plan_after_steps,
        bucket_bytes=config.plan_bucket_size,
        algorithm=config.algorithm,
        gpu_algorithm=config.gpu_algorithm,
        progress_cpu=cpus[local_rank] if local_rank < len(cpus) else -1,
        stall_check_time=config.stall_check_time_seconds,
        stall_shutdown_time=config.stall_shutdown_time_seconds,
        data_timeout=config.gloo_timeout_seconds,
        operation_timeout=config.operation_timeout_seconds,
        deadlock_time=config.deadlock_time_seconds,
        log_level=config.core_log_level,
        log=log.from_core,
    )
    with starting_threads_on(processors):
        return Engine(settings)
