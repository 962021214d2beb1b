"""How the hosts of an elastic job change."""

from enum import IntFlag


class HostUpdateResult(IntFlag):
    """Changes of the hosts of a job: some are gone or have fewer slots, some are new or have more, or both."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3
