"""The exceptions a training script may want to catch. Names and base classes are Horovod's."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed because the job is broken: a rank died, a link broke, a deadline passed.

    Elastic training catches this, restores the last committed state and starts again."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts joined or left the job; raised between steps, so nothing has to be restored.

    ``skip_sync``: hosts only left, so that the state of the ranks that remain is already the same."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(
            "hosts left the job" if skip_sync else "the set of hosts of this job has changed"
        )
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework's version is not the one that an extension was built for.

    ``name``: the framework; ``version``: the one found; ``installed_version``: the one built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(
            f"{name} is version {version}, but horoplug was built for {installed_version}; "
            "reinstall one of them so that they match"
        )
        self.name = name
        self.version = version
        self.installed_version = installed_version


class NotInitializedError(ValueError):
    """A function that needs :func:`init` was called before it, or after :func:`shutdown`."""

    def __init__(self) -> None:
        super().__init__("Horovod has not been initialized; use hvd.init().")
