"""Examines this host and its fleet: what mx can and can't do here, and what to change.

`CHECKS` has every check by name. A check reads what there is, changes nothing, and never starts
CUDA; the fleet is asked as a pull asks it.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mx import config, runtime
from mx.api.doctor import fleet as of_fleet
from mx.api.doctor import host, network
from mx.api.doctor.findings import Finding, Level, Subject
from mx.api.doctor.fleet import Fleet
from mx.api.survey import topology
from mx.errors import ConfigError, MxError
from mx.text import listed

__all__ = ["CHECKS", "Examination", "Finding", "Level", "Subject", "examine"]


def _paths(subject: Subject, fleet: Fleet) -> Iterator[Finding]:
    """Whether a transport leads from each source to this host."""
    answering = next((each.address for each in fleet.answers if each.error is None), None)
    if answering is None or not fleet.sources:
        return
    report = topology(sources=True, coordinator=answering, settings=subject.settings)
    apart = {
        source.record.endpoint: "; ".join(
            sorted(
                {f"{r.transport}: {r.reason}" for p in source.plans.values() for r in p.rejected}
            )
        )
        for source in report.sources
        if not any(plan.chosen for plan in source.plans.values())
    }
    if len(apart) < len(report.sources):
        used = {
            path.transport
            for source in report.sources
            for plan in source.plans.values()
            for path in plan.chosen
        }
        yield Finding(
            Level.OK,
            f"a pull here would read by {listed(sorted(used))}; `mx topo` shows the paths",
        )
    for endpoint, why in apart.items():
        yield Finding(
            Level.WARNING,
            f"no transport leads from the source at {endpoint} to this host: {why}",
            "`mx plan` shows what a pull of one model would do",
        )


_HOST: dict[str, Callable[[Subject], Iterable[Finding]]] = {
    "python": host.python,
    "extras": host.extras,
    "kernel": host.kernel,
    "descriptors": host.descriptors,
    "memory": host.memory,
    "processes": host.processes,
    "clock": host.clock,
    "keys": host.keys,
    "cache": host.cache,
    "transports": network.transports,
    "gpus": network.gpus,
    "rdma": network.rdma,
    "interfaces": network.interfaces,
    "address": network.address,
    "certificates": network.certificates,
}
_FLEET: dict[str, Callable[[Subject, Fleet], Iterable[Finding]]] = {
    "coordinators": of_fleet.coordinators,
    "models": of_fleet.models,
    "sources": of_fleet.sources,
    "paths": _paths,
}
#: The names of the checks, in their order.
CHECKS = (*_HOST, *_FLEET)


@dataclass(frozen=True)
class Examination:
    """All findings, and what the coordinators said."""

    host: str
    findings: tuple[Finding, ...]
    fleet: Fleet

    @property
    def ok(self) -> bool:
        """True if nothing was found that stops what the settings ask for."""
        return not any(each.level is Level.FAILURE for each in self.findings)


def examine(
    settings: config.Settings | None = None,
    *,
    only: Collection[str] = (),
    root: Path = Path("/"),
) -> Examination:
    """Examine this host and its fleet. Blocks for a few of the settings' `connect_timeout_s`.

    Args:
        settings: Settings to use; None loads them from the environment and the files.
        only: The names of the checks to make; all if there are none.
        root: The folder that absolute paths start at.

    Raises:
        ConfigError: There is no check of a name in `only`, or a setting is wrong.
    """
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise ConfigError(
            f"there is no check {listed(unknown)}", hint=f"the checks are {', '.join(CHECKS)}"
        )
    subject = Subject(settings or config.load(), root, time.time())
    wanted = [name for name in CHECKS if name in only or not only]
    found = Fleet()
    of_it = [name for name in wanted if name in _FLEET]
    if of_it:
        few = of_it == ["coordinators"]
        found = runtime.run(lambda: of_fleet.look(subject, coordinators_only=few))
    findings: list[Finding] = []
    for name in wanted:
        check = _HOST[name] if name in _HOST else functools.partial(_of_fleet, name, found)
        findings += (replace(each, check=name) for each in _made(check, subject))
    return Examination(socket.gethostname(), tuple(findings), found)


def _of_fleet(name: str, fleet: Fleet, subject: Subject) -> Iterable[Finding]:
    return _FLEET[name](subject, fleet)


def _made(check: Callable[[Subject], Iterable[Finding]], subject: Subject) -> Iterator[Finding]:
    """Yield what a check finds; one that can't be made is a finding, too."""
    try:
        yield from check(subject)
    except ConfigError as error:
        yield Finding(Level.FAILURE, error.message, error.hint)
    except MxError as error:
        yield Finding(Level.WARNING, f"can't be looked at: {error.message}", error.hint)
    except (OSError, ValueError) as error:
        yield Finding(Level.WARNING, f"can't be looked at: {error}")
