"""`mx.core.progress` <-> protobuf, checked as `mx.codec` does, and the stream that carries it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from mx.codec import (
    MAX_TOTAL_BYTES,
    by_name,
    key_from_wire,
    key_to_wire,
    port_from_wire,
    rate_from_wire,
    source_id_from_wire,
)
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.rates import Rate
from mx.errors import ConfigError, CoordinatorError, PeerProtocolError
from mx.wire.address import join_address, split_address
from mx.wire.channel import cut, translating
from mx.wire.coordinators import Coordinators
from mx.wire.v1 import coordinator_pb2 as pb

#: Reports a pull's progress.
Report = Callable[[PullStatus], Awaitable[None]]

MAX_LAYERS = 1 << 16
MAX_SOURCES = 16
_MAX_HOST_CHARS = 256


_PHASES = {
    PullPhase.RUNNING: pb.PullProgress.PHASE_RUNNING,
    PullPhase.COMPLETE: pb.PullProgress.PHASE_COMPLETE,
    PullPhase.FAILED: pb.PullProgress.PHASE_FAILED,
}


def pull_to_wire(status: PullStatus) -> pb.PullProgress:
    """Return the message; sources and layers beyond a coordinator's limits are left out."""
    ready = status.ready & ((1 << MAX_LAYERS) - 1)
    return by_name(
        pb.PullProgress,
        status,
        model=key_to_wire(status.model),
        host=status.host[:_MAX_HOST_CHARS],
        phase=_PHASES[status.phase],
        layers=min(status.layers, MAX_LAYERS),
        ready=ready.to_bytes((ready.bit_length() + 7) // 8, "little"),
        sources=status.sources[:MAX_SOURCES],
        measured_host=status.measured_host[:_MAX_HOST_CHARS],
    )


def pull_from_wire(message: pb.PullProgress) -> PullStatus:
    """Return the status that a message describes.

    Raises:
        PeerProtocolError: A field is not valid.
    """
    phase = next((p for p, number in _PHASES.items() if number == message.phase), None)
    if phase is None:
        raise PeerProtocolError(f"a pull's phase {message.phase}")
    if message.layers > MAX_LAYERS or len(message.ready) > MAX_LAYERS // 8:
        raise PeerProtocolError(f"a pull of more than {MAX_LAYERS} layers")
    ready = int.from_bytes(message.ready, "little")
    if ready.bit_length() > message.layers:
        raise PeerProtocolError(f"layer {ready.bit_length() - 1} of {message.layers} is ready")
    if message.nbytes > MAX_TOTAL_BYTES:
        raise PeerProtocolError(f"a pull of {message.nbytes} bytes")
    if message.done_bytes > message.nbytes:
        raise PeerProtocolError(f"{message.done_bytes} of {message.nbytes} bytes are done")
    for host in (message.host, message.measured_host):
        if len(host) > _MAX_HOST_CHARS or not (host or "-").isprintable():
            raise PeerProtocolError("the host's name is too long or not printable")
    if len(message.sources) > MAX_SOURCES:
        raise PeerProtocolError(f"more than {MAX_SOURCES} sources")
    for source in message.sources:
        try:
            split_address(source)
        except ConfigError as error:
            raise PeerProtocolError(f"a source of a pull: {error.message}") from None
    return by_name(
        PullStatus,
        message,
        pull_id=source_id_from_wire(message.pull_id),
        model=key_from_wire(message.model),
        phase=phase,
        ready=ready,
        seconds=rate_from_wire(message.seconds, "seconds"),
        sources=tuple(message.sources),
        gb_per_s=rate_from_wire(message.gb_per_s, "gb_per_s"),
        requests_port=port_from_wire(message.requests_port),
        requests_host=_requests_host(message.requests_host),
    )


def _requests_host(text: str) -> str:
    if not text:
        return ""
    if len(text) > _MAX_HOST_CHARS:
        raise PeerProtocolError("the host of requests is too long")
    try:
        return split_address(join_address(text, 1))[0]
    except ConfigError as error:
        raise PeerProtocolError(f"the host of requests: {error.message}") from None


def rate_of_hosts(message: pb.Rate) -> Rate:
    """Return the measured rate that a message describes. Raises PeerProtocolError."""
    for host in (message.source_host, message.host):
        if len(host) > _MAX_HOST_CHARS or not (host or "-").isprintable():
            raise PeerProtocolError("the host's name is too long or not printable")
    return Rate(
        message.source_host,
        message.host,
        rate_from_wire(message.gb_per_s, "gb_per_s"),
        rate_from_wire(message.age_s, "age_s"),
    )


@asynccontextmanager
async def reporting(coordinators: Coordinators) -> AsyncIterator[Report]:
    """Report a pull's progress to a coordinator. The end of the block is the end of the pull.

    After a CoordinatorError it may be reported to the next coordinator.

    Args:
        coordinators: Of which one is told.

    Yields:
        A function that reports a status; call it at most once a second.

    Raises:
        CoordinatorError: The coordinator does not take reports, or does not answer.
        MxError: As `translate`, if the coordinator refuses.
    """
    async with coordinators.using() as link:
        call, where = link.stub.Progress(), link.remote.address
        not_taken = CoordinatorError(f"the coordinator at {where} takes no progress reports")

        async def report(status: PullStatus) -> None:
            try:
                async with asyncio.timeout(link.timeout_s):
                    await call.write(pb.ProgressRequest(pull=pull_to_wire(status)))
            except asyncio.InvalidStateError:  # it has ended the stream
                await call
                raise not_taken from None

        try:
            with translating(link.remote):
                yield report
                async with asyncio.timeout(link.timeout_s):
                    await call.done_writing()
                    await call
        except (TimeoutError, asyncio.InvalidStateError):
            raise not_taken from None
        finally:
            cut(call)
