"""Examines this host and its fleet: what mx can and can't do here, and what to change.

`CHECKS` has every check by name. A check reads what there is, changes nothing, and never starts
CUDA; the fleet is asked as a pull asks it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mx import config, runtime
from mx.errors import ConfigError, MxError
from mx.operations.doctor import fleet, host, network
from mx.operations.doctor.findings import ExaminedHost, Finding, Level, failure, warning
from mx.operations.doctor.fleet import FleetSurvey
from mx.text import listed

if TYPE_CHECKING:
    from mx.operations.doctor.disk import DiskRate

__all__ = ["CHECKS", "Examination", "ExaminedHost", "Finding", "Level", "examine"]


_HOST: dict[str, Callable[[ExaminedHost], Iterable[Finding]]] = {
    check.__name__: check
    for check in (
        *(host.python, host.kernel, host.descriptors, host.memory, host.processes, host.clock),
        *(host.keys, host.cache, network.transports, network.gpus, network.rdma),
        *(network.interfaces, network.address, network.certificates),
    )
}
_FLEET: dict[str, Callable[[ExaminedHost, FleetSurvey], Iterable[Finding]]] = {
    check.__name__: check
    for check in (fleet.coordinators, fleet.models, fleet.sources, fleet.paths)
}
#: The names of the checks, in their order.
CHECKS = (*_HOST, *_FLEET)


@dataclass(frozen=True)
class Examination:
    """All findings, what the coordinators said, and what a drive gave."""

    host: str
    findings: tuple[Finding, ...]
    fleet: FleetSurvey
    disk: tuple[DiskRate, ...] = ()

    @property
    def ok(self) -> bool:
        """True if nothing was found that stops what the settings ask for."""
        return not any(each.level is Level.FAILURE for each in self.findings)


def examine(
    settings: config.Settings | None = None,
    *,
    only: Collection[str] = (),
    disk: Path | None = None,
) -> Examination:
    """Examine this host and its fleet. Blocks for a few of the settings' `connect_timeout_s`.

    Args:
        settings: Settings to use; None loads them from the environment and the files.
        only: The names of the checks to make; all if there are none.
        disk: A file or folder whose drive to measure, in place of all checks.

    Raises:
        ConfigError: There is no check of a name in `only`, a setting is wrong, or `disk` is neither
            a file nor a folder that can be read.
        LocalError: The disk fails.
    """
    if disk is not None:
        from mx.operations.doctor.disk import findings as of_disk
        from mx.operations.doctor.disk import measure

        rates = tuple(measure(disk))
        told = (replace(each, check="disk") for each in of_disk(disk, list(rates)))
        return Examination(socket.gethostname(), tuple(told), FleetSurvey(), rates)
    unknown = [name for name in only if name not in CHECKS]
    if unknown:
        raise ConfigError(
            f"there is no check {listed(unknown)}", hint=f"the checks are {', '.join(CHECKS)}"
        )
    subject = ExaminedHost(settings or config.load(), now_s=time.time())
    wanted = [name for name in CHECKS if name in only or not only]
    of_fleet = [name for name in wanted if name in _FLEET]
    asked = FleetSurvey()
    if of_fleet:
        few = of_fleet == ["coordinators"]
        asked = runtime.run(lambda: fleet.look(subject, coordinators_only=few))
    findings: list[Finding] = []
    for name in wanted:
        made = _HOST[name](subject) if name in _HOST else _FLEET[name](subject, asked)
        findings += (replace(each, check=name) for each in _safely(made))
    return Examination(socket.gethostname(), tuple(findings), asked)


def _safely(check: Iterable[Finding]) -> Iterator[Finding]:
    """Yield what a check finds; one that can't be made is a finding, too."""
    try:
        yield from check
    except ConfigError as error:
        yield failure(error.message, error.hint)
    except (MxError, OSError, ValueError) as error:
        yield warning(f"can't be looked at: {error}")
