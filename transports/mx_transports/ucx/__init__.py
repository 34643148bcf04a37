"""The `ucx` transport: one-sided reads through NIXL's UCX back-end, by RDMA where there is any.

Each NIC of a source has an agent in a process of its own; each session has an agent on one NIC, so
that several sessions use several NICs (rails inside one agent do not stripe reads: 0.96 of one
link where one agent per NIC gave 1.84 to 1.92 of two).

The target's agent lives in the target's process, whose memory it must write to: a hostile
peer that reaches it can read and write all of it. So beyond loopback the transport requires
`trusted_fabric` on both sides, and it is never what a plan prefers on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.core.topology import Place
from mx.errors import LocalError, NotAllowedError, PeerProtocolError, PeerRefusedError
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
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.stream import SocketStream
from mx_transports.toolkit.tls import tls_context
from mx_transports.ucx import nixl
from mx_transports.ucx.exposure import UcxExposure
from mx_transports.ucx.session import UcxSession
from mx_transports.ucx.wire import (
    FAILED,
    INFO,
    MAGIC,
    MAX_INFO_BYTES,
    READY,
    STARTING,
    AgentInfo,
    decode_info,
    reader_device,
)

__all__ = ["UcxTransport"]

#: Estimates for planning, beside those of tcp (2 and 3): over sockets UCX reached 0.5 of memcpy
#: where two plain sockets reached 0.72. RDMA is as fast as its NICs.
LOOPBACK_GB_PER_S = 1.4
GB_PER_S = 2.1
#: An RDMA port of 400 Gbit/s; the rail's own speed is the limit where it is lower.
RDMA_GB_PER_S = 50.0

_NOT_INSTALLED = (
    "NIXL is not installed: in a clone of mx, pip install '.[cuda12]' (it also runs without a "
    "GPU), or '.[cuda13]' on machines with CUDA 13"
)


class UcxTransport:
    """See `mx.transport.Transport`. Exposes sealed memfds."""

    name = "ucx"

    def probe(self) -> Viable | Unavailable:
        found = nixl.find()
        if found is None:
            return Unavailable(_NOT_INSTALLED)
        return Viable(f"{found.package} {found.version}")

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return a path as tcp does: between any two places with addresses; those that have none
        but of loopback are reached on their own machine only."""
        local = dial.one_network(here, there)
        if here.device != "cpu" or there.device != "cpu" or local is None:
            return None
        if local:
            # They meet on loopback only if that is where one of them is.
            trusting = not any(dial.only_loopback(place) for place in (here, there))
            return Path(self.name, LOOPBACK_GB_PER_S, detail="one machine", trusting=trusting)
        return Path(
            self.name,
            GB_PER_S,
            detail="UCX over TCP",
            medium=Medium.NETWORK,
            rdma_gb_per_s=RDMA_GB_PER_S,
            trusting=True,
        )

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable.

        Raises:
            NotAllowedError: A host is beyond loopback, and `trusted_fabric` is not set.
            LocalError: NIXL is not installed, memory is not in a sealed memfd, or a host can't be
                listened on.
            ConfigError: A TLS file can't be used.
        """
        found = nixl.find()
        if found is None:
            raise LocalError(_NOT_INSTALLED)
        tls = tls_context(options.tls, server=True) if options.tls else None
        return UcxExposure(regions, options, tls, found.bindings)

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure.

        Raises:
            SourceError: The source can't be reached, or does not let us in; PathError where NIXL
                or UCX fails.
            NotAllowedError: The source is beyond loopback, and `trusted_fabric` is not set.
            ConfigError: A TLS file can't be used.
        """
        ticket = framing.decode_ticket(grant.ticket, grant.peer)
        addresses = dial.addresses(ticket, grant)
        beyond = [host for host, _ in addresses if not dial.is_loopback(host)]
        if beyond and not grant.trusted_fabric:
            raise NotAllowedError(
                f"{grant.peer} by ucx: it enforces no bounds, and {beyond[0]} is not this machine",
                hint="set `trusted_fabric` if every host on that network is trusted",
            )
        tls = tls_context(grant.tls, server=False) if grant.tls else None
        stream = dial.connect_any(MAGIC, list(addresses), addresses, ticket, grant, tls)
        agent: nixl.TargetAgent | None = None
        try:
            nixl.load(grant.peer)  # while the source starts its agent
            dial.greet(MAGIC, stream, grant)
            info = _receive_info(stream, grant.peer)
            device = reader_device(grant.place, stream.local_host, info.devices)
            agent = nixl.TargetAgent(grant.peer, device)
            agent.connect(info.metadata)
        except BaseException as error:
            stream.close()
            if agent is not None:
                agent.close()
            if isinstance(error, OSError):
                raise dial.translate(error, grant.peer, grant.peer) from error
            raise
        return UcxSession(grant, stream, agent, info)


def _receive_info(stream: SocketStream, peer: str) -> AgentInfo:
    """Wait for the source's agent, however long it starts, while the source reports STARTING."""
    while True:
        kind, nbytes = INFO.unpack(stream.receive(INFO.size))
        if nbytes > MAX_INFO_BYTES:
            raise PeerProtocolError(f"{peer}: {nbytes} bytes about an agent", peer=peer)
        data = stream.receive(nbytes)
        if kind == READY:
            return decode_info(bytes(data), peer)
        if kind == FAILED:
            said = bytes(data[:500]).decode(errors="replace")
            raise PeerRefusedError(f"{peer} by ucx: {said}", peer=peer)
        if kind != STARTING:
            raise PeerProtocolError(f"{peer}: {kind} is no kind of answer", peer=peer)
