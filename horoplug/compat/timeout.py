"""``horovod.runner.common.util.timeout``: deadlines."""

import time


class TimeoutException(Exception):
    """A deadline has passed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A deadline ``timeout`` seconds from now. ``message``: the error text, with a placeholder ``{activity}``."""

    def __init__(self, timeout: float, message: str) -> None:
        self._seconds = timeout
        self._end = time.monotonic() + timeout
        self._message = message

    def remaining(self) -> float:
        """Seconds that are left; 0 after the deadline."""
        return max(0.0, self._end - time.monotonic())

    def timed_out(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self._end

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException after the deadline."""
        if self.timed_out():
            text = self._message.format(activity=activity).rstrip().removesuffix(".")
            raise TimeoutException(f"{text}. Timeout after {self._seconds} seconds")
