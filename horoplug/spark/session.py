"""What a job has to know about the Spark application: its slots, its addresses, and how its jobs fail.

The problems of a user have one line that says what to do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, overload

from packaging.version import Version

from horoplug.base import alias
from horoplug.compat import SITE
from horoplug.rendezvous.network.interfaces import interface_address
from horoplug.runner.environment import DECIDED
from horoplug.runner.forwarding import NAMED, forwarded, split

INSTALL: Final = "pip install 'horoplug[spark]' (Spark also needs Java 17 or newer)"
# Executors of a static allocation register one after the other when an application starts.
_EXECUTORS_SECONDS = 30.0
_REPLACEMENT_SECONDS = 10.0  # for an executor that was lost just before
_HEADS: Final = ("HOROVOD_", "HOROPLUG_")


def active_context() -> Any:
    """The SparkContext of this process. Errors: RuntimeError if there is none; ImportError."""
    try:
        from pyspark import SparkContext, __version__
    except ImportError as error:
        raise ImportError(f"horoplug.spark needs pyspark: {INSTALL}") from error
    # Without what vendors append, such as "-amzn-1", which is not part of a Python version.
    if Version(__version__.partition("-")[0]).release < (3, 5):
        raise ImportError(
            f"horoplug.spark needs pyspark 3.5 or later, and this is {__version__}: {INSTALL}"
        )
    context = SparkContext._active_spark_context
    if context is None:
        if os.environ.get("SPARK_REMOTE") or "pyspark.sql.connect.session" in sys.modules:
            raise RuntimeError(
                "horoplug.spark runs in the driver's process, and not in a client of Spark Connect: use a session "
                "without .remote()"
            )
        raise RuntimeError(
            "there is no Spark session: create one with SparkSession.builder.getOrCreate() before"
        )
    return context


def is_dynamic(context: Any) -> bool:
    """Whether Spark starts executors on demand."""
    enabled = context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"
    return enabled and not _is_local(context)


def slots(context: Any) -> int | None:
    """The number of tasks that run at once on the executors that there are; None if Spark does not tell."""
    try:
        scala = context._jsc.sc()
        profile = scala.resourceProfileManager().defaultResourceProfile()
        return int(scala.maxNumConcurrentTasks(profile))
    except Exception:  # an interface of Spark's own
        return None


def wait_for_slots(context: Any, wanted: int, seconds: float) -> int | None:
    """Wait until there are ``wanted`` slots. Returns their number; None if Spark does not tell.

    ``seconds``: limit; besides, without dynamic allocation no executors come 30 s after the application's start, except
    for one that replaces another."""
    age = time.time() - context.startTime / 1000
    patience = 0.0 if _is_local(context) else max(_EXECUTORS_SECONDS - age, _REPLACEMENT_SECONDS)
    deadline = time.monotonic() + min(seconds, patience)
    while True:
        have = slots(context)
        if have is None or have >= wanted or time.monotonic() >= deadline:
            return have
        time.sleep(0.1)


def require_slots(context: Any, wanted: int, seconds: float) -> None:
    """Wait until there are enough slots for ``num_proc`` ranks; see :func:`wait_for_slots`. Errors: ValueError with the
    number of slots."""
    if wanted < 1:
        raise ValueError(f"num_proc={wanted}: at least 1 is wanted")
    check_slots("num_proc", wanted, wait_for_slots(context, wanted, seconds))


def check_slots(name: str, wanted: int, have: int | None) -> None:
    """Errors: ValueError if there are fewer slots than wanted. ``name``: the argument that wants them."""
    if have is not None and have < wanted:
        raise ValueError(
            f"{name}={wanted}, but Spark runs only {have} tasks at once (its executors' cores / spark.task.cpus, and "
            "GPUs where tasks ask for them): use fewer processes or more executors"
        )


@overload
def listed(nics: None) -> None: ...
@overload
def listed(nics: Sequence[str] | str) -> str: ...
def listed(nics: Sequence[str] | str | None) -> str | None:
    """The names of network interfaces as one text, separated by commas; None: any."""
    return nics if isinstance(nics, str) or nics is None else ",".join(nics)


def driver_address(context: Any, nics: Sequence[str] | str | None) -> str:
    """The address of this process at which the executors reach it. ``nics``: network interfaces of which the first that
    exists is used. Errors: ValueError for an unknown interface."""
    if nics:
        return interface_address(listed(nics), "nics")
    host = str(context.getConf().get("spark.driver.host", "127.0.0.1"))
    return host.strip("[]")


def unusable_address(address: str, error: OSError) -> OSError:
    """The error for an address of the driver that cannot be bound."""
    return OSError(
        f"horoplug.spark: {address} is no address of this machine ({error.strerror or error}): set spark.driver.host "
        "to one that the executors reach, or pass nics=..."
    )


def settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The settings of horoplug in the driver's environment, without prefix, that the ranks get, too."""
    found: dict[str, str] = {}
    for head in _HEADS:  # the second one takes precedence
        for name, value in forwarded(env).items():
            bare = name.removeprefix(head)
            if bare != name and bare not in DECIDED and not bare.startswith("SPARK_"):
                found[bare] = value
    return found


def named_variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The other variables that the ranks get, because HOROPLUG_FORWARD names them."""
    kept = forwarded({name: env[name] for name in split([env.get(NAMED, "")]) if name in env})
    return {name: value for name, value in kept.items() if not name.startswith(_HEADS)}


def is_compat() -> bool:
    """Whether this process imports horoplug under the name horovod (:mod:`horoplug.compat`)."""
    return alias.is_compat() or SITE in os.environ.get("PYTHONPATH", "").split(os.pathsep)


def not_run(error: BaseException | None) -> RuntimeError:
    """The error for a job of Spark that has ended before all ranks were started."""
    return RuntimeError(f"horoplug.spark: Spark could not run the job: {reason(error)}")


def reason(error: BaseException | None) -> str:
    """Why a job of Spark has failed, in one line. ``error``: None if it has not."""
    if error is None:
        return "its tasks have ended"
    text = str(error)
    if "No module named 'horoplug" in text:
        return "horoplug is not installed in the executors' Python (spark.pyspark.python)"
    for line in text.splitlines():
        found = line.strip()
        if found and not found.startswith(("An error occurred", "Traceback", ": org.apache")):
            return found
        if found.startswith(": org.apache"):
            return found.partition(": ")[2].partition(": ")[2] or found
    return type(error).__name__


def _is_local(context: Any) -> bool:
    """Whether the tasks run on this machine in the driver's process of Java."""
    master = str(context.master)
    return master == "local" or master.startswith("local[")
