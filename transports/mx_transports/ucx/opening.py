"""Opens a session: the dial, the hello, and the exchange of the agents' metadata."""

from __future__ import annotations

from collections.abc import MutableSequence
from functools import partial

from mx.errors import NotAllowedError, PeerProtocolError, PeerRefusedError
from mx.transport import Grant
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.reach import is_loopback
from mx_transports.toolkit.stream import SocketStream
from mx_transports.ucx import nixl
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
    devices_at,
    goes_direct,
    reader_device,
)


def open_session(grant: Grant, undirected: MutableSequence[str]) -> UcxSession:
    """Connect to an exposure. Raises as `UcxTransport.open`.

    Args:
        grant: The grant.
        undirected: The peers whose GPU's memory is not read directly, since that has failed. A
            session in which it fails adds its own.
    """
    ticket = framing.decode_ticket(grant.ticket, grant.peer)
    addresses = dial.addresses(ticket, grant)
    beyond = [host for host, _ in addresses if not is_loopback(host)]
    if beyond and not grant.trusted_fabric:
        raise NotAllowedError(
            f"{grant.peer} by ucx: it enforces no bounds, and {beyond[0]} is not this machine",
            hint="set `trusted_fabric` if every host on that network is trusted",
        )
    stream = dial.begin(MAGIC, next(dial.connections(addresses, grant)), ticket, grant)
    agent: nixl.TargetAgent | None = None
    try:
        host = stream.local_host
        # While the source starts its own: on the RDMA port, if there is one, as it will have one.
        devices = devices_at(grant.place, host)
        device = devices[-1] if devices else ""
        agent = nixl.TargetAgent(grant.peer, device)
        dial.greet(MAGIC, stream, grant)
        info = _receive_info(stream, grant.peer)
        needed = reader_device(grant.place, host, info.devices)
        if needed != device:
            agent.close()
            agent = nixl.TargetAgent(grant.peer, needed)
        direct = None
        wanted = info.direct and grant.device != "cpu" and grant.peer not in undirected
        if wanted and goes_direct(grant.setting, (needed,)):
            from mx_transports.ucx import direct_session

            failed = partial(undirected.append, grant.peer)
            direct = direct_session.open_direct(grant, stream, info, needed, _receive_info, failed)
        if direct is not None:
            agent.close()
            return direct_session.DirectSession(grant, stream, *direct, failed)
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
            raise PeerProtocolError(f"{peer}: {kind} is not a kind of answer", peer=peer)
