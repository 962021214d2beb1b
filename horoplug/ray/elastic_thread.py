"""The loop of an elastic job beside the callbacks of the user."""

from __future__ import annotations

import threading

from horoplug.ray.calls import Reports
from horoplug.runner.elastic_worker_job import ElasticWorkerJob
from horoplug.runner.ending.finish import Finish

_STOP_SECONDS = 30.0


def run_job(job: ElasticWorkerJob, reports: Reports) -> Finish:
    """Run a job to its end, and call the callbacks meanwhile, in this thread. Errors: those of the callbacks, and
    KeyboardInterrupt; the job is over then."""
    found: list[Finish | BaseException] = []

    def run() -> None:
        try:
            found.append(job.run())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="horoplug-ray-elastic", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            # Without a limit, Ctrl-C would not be noticed.
            thread.join(reports.poll_seconds or 1.0)
            reports.deliver()
    except BaseException:
        job.stop()
        thread.join(_STOP_SECONDS)  # it may be waiting for the cluster
        raise
    reports.deliver()
    (outcome,) = found
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
