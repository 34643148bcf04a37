"""The `ucx` transport: one-sided reads through NIXL's UCX back-end, by RDMA where there is any.

Each NIC of a source has an agent in a process of its own; each session has an agent on one NIC, so
that several sessions use several NICs (rails inside one agent do not stripe reads: 0.96 of one
link where one agent per NIC gave 1.84 to 1.92 of two).

The target's agent lives in the target's process, whose memory it must write to: a hostile
peer that reaches it can read and write all of it. So beyond loopback the transport requires
`trusted_fabric` on both sides, and it is never what a plan prefers on one machine.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import MutableSequence, Sequence

from mx.core.topology import Place
from mx.errors import LocalError, SourceError, install_hint
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Session,
    Unavailable,
    Viable,
)
from mx_transports.toolkit.reach import one_network, only_loopback

__all__ = ["UcxTransport"]

#: Estimates for planning, beside those of tcp (2 and 3): over sockets UCX reached 0.5 of memcpy
#: where two plain sockets reached 0.72. RDMA is as fast as its NICs.
LOOPBACK_GB_PER_S = 1.4
GB_PER_S = 2.1
#: An RDMA port of 400 Gbit/s; the rail's own speed is the limit where it is lower.
RDMA_GB_PER_S = 50.0

#: Peers that are known to fail where a GPU's memory is read directly.
_MOST_UNDIRECTED = 64

_NOT_INSTALLED = f"NIXL is not installed (it needs no GPU): {install_hint('cuda12', 'cuda13')}"


class UcxTransport:
    """See `mx.transport.Transport`. Exposes sealed memfds."""

    name = "ucx"

    def __init__(self) -> None:
        self._undirected: MutableSequence[str] = deque(maxlen=_MOST_UNDIRECTED)

    def probe(self) -> Viable | Unavailable:
        from mx_transports.ucx import nixl

        found = nixl.find()
        if found is None:
            return Unavailable(_NOT_INSTALLED)
        return Viable(f"{found.package} {found.version}")

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return a path as tcp does: between any two places with addresses; those that have none
        but of loopback are reached on their own machine only. Between the GPUs of two machines it
        is staged, too, but over RDMA a session may fill the GPU by itself."""
        local = one_network(here, there)
        gpus = [place.device for place in (here, there) if place.device != "cpu"]
        if local is None or (gpus and (local or len(gpus) == 1)):
            return None
        if local:
            # They meet on loopback only if that is where one of them is.
            trusting = not any(only_loopback(place) for place in (here, there))
            return Path(self.name, LOOPBACK_GB_PER_S, detail="one machine", trusting=trusting)
        return Path(
            self.name,
            GB_PER_S,
            detail="UCX over TCP" + (", staged through host memory" if gpus else ""),
            medium=Medium.NETWORK,
            rdma_gb_per_s=RDMA_GB_PER_S,
            rdma_detail="GPUDirect if it works, else RDMA and staging" if gpus else "RDMA",
            trusting=True,
            plain=True,
            staged=bool(gpus),
        )

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable.

        Raises:
            NotAllowedError: A host is beyond loopback, and `trusted_fabric` is not set.
            LocalError: NIXL is not installed, memory is not in a sealed memfd, or a host can't be
                listened on.
            ConfigError: A TLS file can't be used.
        """
        from mx_transports.ucx import nixl
        from mx_transports.ucx.exposure import UcxExposure

        found = nixl.find()
        if found is None:
            raise LocalError(_NOT_INSTALLED)
        return UcxExposure(regions, options, found.bindings)

    def prepare(self) -> None:
        """Load NIXL and UCX: 0.1 s in a new process."""
        from mx_transports.ucx import nixl, opening  # noqa: F401 - `open` needs it

        with contextlib.suppress(SourceError):
            nixl.load("a source")

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure.

        Raises:
            SourceError: The source can't be reached, or does not let us in; PathError where NIXL
                or UCX fails.
            NotAllowedError: The source is beyond loopback, and `trusted_fabric` is not set.
            ConfigError: A TLS file can't be used.
        """
        from mx_transports.ucx.opening import open_session

        return open_session(grant, self._undirected)
