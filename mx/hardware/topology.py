"""All that a process knows of where it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mx.core.topology import Place
from mx.transport import Unavailable, Viable


@dataclass(frozen=True, slots=True)
class Topology:
    """`place` with every interface, NUMA node and GPU of the machine that this process sees.

    `missing` says of "nics", "numa_nodes" and "gpus" why they are not, or not all, known;
    `transports` what each transport says of itself, by name.
    """

    place: Place
    missing: Mapping[str, str] = field(default_factory=dict)
    transports: Mapping[str, Viable | Unavailable] = field(default_factory=dict)
