"""What a process knows about its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from mx.core.topology import Place
from mx.records import record
from mx.transport import Unavailable, Viable


@record(frozen=True, slots=True)
class Topology:
    """The machine as this process sees it.

    `place` has every interface, NUMA node and GPU. `missing` has the reasons why "nics",
    "numa_nodes" or "gpus" are unknown or incomplete. `transports` has, by name, whether each
    transport works here.
    """

    place: Place
    missing: Mapping[str, str] = field(default_factory=dict)
    transports: Mapping[str, Viable | Unavailable] = field(default_factory=dict)
