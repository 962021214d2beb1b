"""The elastic job that a command line describes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from horoplug.base import config
from horoplug.runner.checks import UsageError, check_command
from horoplug.runner.elastic.discovery import DiscoveryError, HostDiscoveryScript, MergedHosts
from horoplug.runner.elastic.roster import Limits, make_limits
from horoplug.runner.elastic.stragglers import Pacing
from horoplug.runner.environment import common_environment
from horoplug.runner.hosts.hosts import Host, Machines, Placement, assign_ranks
from horoplug.runner.job.elastic import ElasticPolicy
from horoplug.runner.job.job import Job
from horoplug.runner.job.spec import JobSpec

from .arguments import Options
from .job_options import common_fields, wrong_settings

_UNLIMITED = 1 << 20


def make_elastic_job(
    options: Options, hosts: Sequence[Host] | None, make_spec: Callable[..., JobSpec]
) -> Job:
    """The elastic job that the options describe. ``hosts``: those that the options name, None: none; ``make_spec``:
    takes the fields of the specification that the options give. Errors: UsageError."""
    limits = _limits(options)
    discovery = None
    if options.host_discovery_script is not None:
        if hosts is not None:
            raise UsageError(lambda t: f"{t.discovery}: not allowed with {t.hosts} or {t.hostfile}")
        script = HostDiscoveryScript(options.host_discovery_script, options.slots_per_host)
        discovery = MergedHosts(script, Machines())
        try:
            found = discovery.find_available_hosts_and_slots()
        except DiscoveryError:
            found = {}  # the job reports it, and tries again
        hosts = [Host(name, slots) for name, slots in found.items()]
    elif hosts is None:
        hosts = [
            Host("localhost", limits.maximum if limits.maximum < _UNLIMITED else limits.minimum)
        ]
    placements = assign_ranks(hosts, sum(host.slots for host in hosts)) if hosts else []
    check_command(options.command, here=any(host.is_local for host in placements))
    slots = {placement.name: len(placement.ranks) for placement in placements}
    with wrong_settings():
        env = common_environment(os.environ, options.settings)
        spec = make_spec(
            size=min(limits.maximum, max(sum(slots.values()), 1)),
            hosts=[Placement(p.name, p.is_local, (), p.addresses) for p in placements],
            hosts_may_come=limits.hosts_may_come,
            **common_fields(options),
        )
        policy = functools.partial(
            ElasticPolicy,
            limits=limits,
            slots=slots,
            discovery=discovery,
            cooldown_range=_cooldown(options),
            pacing=Pacing(
                factor=config.value("SLOW_FACTOR", env),
                seconds=config.value("SLOW_SECONDS", env),
                replaced=float(options.replace_slow or 0),
            ),
            notice_signal=config.value("NOTICE_SIGNAL", env),
            requeues=config.value("REQUEUE", env),
        )
        return Job(spec, policy)


def _limits(options: Options) -> Limits:
    wished, least, most = options.num_proc, options.min_num_proc, options.max_num_proc
    minimum = least or wished or 1
    maximum = most or wished or _UNLIMITED
    if least is not None and most is not None and least > most:
        raise UsageError(lambda t: f"{t.minimum} {least} is more than {t.maximum} {most}")
    if least is not None and wished is not None and least > wished:
        raise UsageError(lambda t: f"{t.minimum} {least} is more than {t.size} {wished}")
    if wished is not None and most is not None and wished > most:
        raise UsageError(lambda t: f"{t.size} {wished} is more than {t.maximum} {most}")
    with wrong_settings():
        env = common_environment(os.environ, options.settings)
        return make_limits(
            minimum,
            maximum,
            resets=options.reset_limit,
            hosts_may_come=options.host_discovery_script is not None,
            environment=env,
        )


def _cooldown(options: Options) -> tuple[float, float] | None:
    if options.blacklist_cooldown_range is None:
        return None
    least, most = options.blacklist_cooldown_range
    if least > most:
        raise UsageError(lambda t: f"{t.cooldown}: {least} is more than {most}")
    return float(least), float(most)
