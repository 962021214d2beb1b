"""The actor that is a rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray

from horoplug.ray import ray_logger
from horoplug.ray.ends import ProcessId, own_process
from horoplug.runner.functions.run_task import Outcome, attempt, describe
from horoplug.runner.worker_job import enter

_SECRETS = ("_HOROVOD_SECRET_KEY", "HOROPLUG_SECRET_KEY", "HOROVOD_SECRET_KEY")


class BaseHorovodWorker:
    """A rank. ``ray.remote(BaseHorovodWorker)`` is its actor."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        """``world_rank``, ``world_size``: the rank and the number of ranks, until :meth:`enter_job` sets them."""
        os.environ["HOROVOD_HOSTNAME"] = self.node_id()
        os.environ["HOROVOD_RANK"] = str(world_rank)
        os.environ["HOROVOD_SIZE"] = str(world_size)

    def node_id(self) -> str:
        """The identity of the node of Ray on which the actor is."""
        return str(ray.get_runtime_context().get_node_id())

    def process(self) -> ProcessId:
        """The process of the actor."""
        return own_process()

    def hostname(self) -> str:
        """The name of the host."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray has given to this actor."""
        return [str(number) for number in ray.get_gpu_ids()]

    def update_env_vars(self, env_vars: Mapping[str, str]) -> None:
        """Set environment variables."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """The environment variables, without the secret of the job."""
        return {name: value for name, value in os.environ.items() if name not in _SECRETS}

    def enter_job(self, variables: Mapping[str, str]) -> None:
        """Set the variables of the job, before its functions call ``init()``."""
        enter(variables)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Make the object on which :meth:`execute` calls functions."""
        if executable_cls is not None:
            args, kwargs = executable_args or [], executable_kwargs or {}
            self.executable = executable_cls(*args, **kwargs)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call ``func`` with the executable."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """The queue for :func:`horoplug.ray.ray_logger.log`."""
        ray_logger.configure(queue)

    def attempt(self, packed: bytes) -> Outcome:
        """Call a function that :func:`horoplug.runner.functions.run_task.pack` has packed, with the executable before
        its other arguments. Returns its result or its exception."""
        return attempt(lambda: packed, self.executable)

    def attempt_elastic(self, packed: bytes, executable: tuple[Any, ...] | None) -> Outcome:
        """As :meth:`attempt`, after :meth:`start_executable` with these arguments, None: without it."""
        try:
            self.start_executable(*(executable or ()))
        except Exception as error:
            return Outcome(None, describe(error))
        return self.attempt(packed)

    def attempt_or_raise(self, packed: bytes, rank: int) -> Any:
        """As :meth:`attempt`, but raises RankError for an exception."""
        outcome = self.attempt(packed)
        if outcome.failure is not None:
            raise outcome.failure.error(f"rank {rank}: {outcome.failure.text}", rank)
        return outcome.value
