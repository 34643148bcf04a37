"""Servers: one set of options, the rule for addresses, errors as statuses.

Services are registered from their protobuf descriptors, not with the generated `add_…` functions,
because those answer a request that does not parse with UNKNOWN. A call of them, unlike one of the
health service, begins with the versions that the client speaks, and its answer with this process's.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from mx import counters, runtime
from mx.core import versions
from mx.core.budget import Limits
from mx.core.versions import Versions, headers, sent
from mx.errors import (
    CapacityError,
    LocalError,
    MxError,
    PeerProtocolError,
    PeerVersionError,
    UnknownModelError,
    UnknownSourceError,
)
from mx.log import Throttle, event
from mx.tasks import uncut
from mx.transport import TlsFiles
from mx.units import KIB
from mx.wire.address import (
    WILDCARDS,
    address_of_peer,
    join_address,
    require_protection,
    split_address,
)
from mx.wire.calls import Calls, ServerCall
from mx.wire.channel import KEEPALIVE_OPTIONS, remember_unix
from mx.wire.descriptors import most_connections
from mx.wire.ports import require_free, why_not_unix
from mx.wire.rpc import MalformedMessage, parser
from mx.wire.status import DETAIL_KEY, code_of, encode_detail, status_text
from mx.wire.upkeep import Upkeep

if TYPE_CHECKING:
    from mx.wire.principals import Access
    from mx.wire.reloading import ServerFiles

_log = logging.getLogger(__name__)
_refusals = Throttle()

_SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *KEEPALIVE_OPTIONS,
    # The other end of a connection may be gone without a word, its reset lost in a cut link. The
    # connection would stay until an answer that nothing takes is `mx.wire.calls.UNREAD_S` old.
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients of mx ping each second; the default would disconnect them.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
    ("grpc.http2.max_ping_strikes", 0),
    # Otherwise two servers could share a port, and each would get some of the clients.
    ("grpc.so_reuseport", 0),
    # A client that connects and sends nothing is disconnected after this.
    ("grpc.server_handshake_timeout_ms", 5000),
    # One process has a handful of streams open; more than this wait at the client. Each may hold a
    # request, which gRPC takes in before a call is seen here.
    ("grpc.max_concurrent_streams", 100),
    # With it gRPC resets calls of a connection that has fewer, once others have many.
    ("grpc.http.overload_protection", 0),
    # A message is taken in before it is asked for, and as much of the next one as the window has.
    ("grpc.http2.lookahead_bytes", 4 * KIB),
    # It would widen the windows of connections that send much.
    ("grpc.http2.bdp_probe", 0),
    # Calls that have arrived and that the event loop has not taken yet. Beyond the first number
    # (1,000 by default) gRPC cancels some new calls at random, silently on both sides: a thousand
    # sources that registered at once exceeded it while the loop was busy.
    ("grpc.server.max_pending_requests", 16_384),
    ("grpc.server.max_pending_requests_hard_limit", 32_768),
)

#: The parts of the largest age of a connection at which clients are told to make another one (which
#: gRPC varies by a tenth), and after which it is ended from then on.
_AGE_PARTS = 0.45, 0.5

#: A connection without a call is ended after this, whether or not it answers pings.
IDLE_S = 30.0

#: A call whose first message does not come within this time is refused.
FIRST_MESSAGE_S = 15.0

#: What an error calls the process that provides a service.
_NAMES = {"Cache": "cache", "Coordinator": "coordinator", "Peer": "source"}

_DRAIN_TIMEOUT_S = 2.0
_DRAIN_MESSAGES = 16_384  # pieces of 64 KiB: more than any registration has


@dataclass(frozen=True, slots=True)
class Service:
    """A service of the protocol and the object whose async methods implement it.

    The methods have the names of the proto and the form that grpc.aio expects (`request, context`;
    a streamed answer is yielded, or written to the context). An `MxError` that a method raises
    becomes the call's status. `on_call` gets the context of each call that is understood, and what
    its caller speaks; `on_refused` that of each call that ends with an error.
    """

    descriptor: ServiceDescriptor
    servicer: object
    on_call: Callable[[Any, Versions], None] = lambda context, versions: None
    on_refused: Callable[[Any, MxError], None] = lambda context, error: None


@dataclass(frozen=True, slots=True)
class Listening:
    """A running server. `address` is HOST:PORT with the port that it listens on."""

    server: grpc.aio.Server
    address: str
    port: int
    _health: Any
    _upkeep: Upkeep
    _files: ServerFiles | None = None

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new RPCs, let running ones finish within `grace_s`, then cut them."""
        self._upkeep.stop()
        if self._files is not None:
            await self._files.stop()
        if self._health is not None:
            await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _checked(request: object) -> object:
    if isinstance(request, MalformedMessage):
        raise request.error()
    return request


class _CheckedRequests:
    """A request stream that raises for a message that did not parse, and for a first one that
    does not come within `FIRST_MESSAGE_S`; unless `patient`, for any that does not."""

    def __init__(
        self, requests: AsyncIterator[object], call: ServerCall, method: str, *, patient: bool
    ) -> None:
        self._requests = requests
        self._call = call
        self._method = method
        self._patient = patient
        self._deadline_s: float | None = FIRST_MESSAGE_S

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        timeout_s = self._deadline_s
        if self._patient:
            self._deadline_s = None
        # Asked for only now: gRPC's generator warns if it is made and never run, as it would be
        # by a method that ends before it reads.
        requests = aiter(self._requests)
        if timeout_s is None:
            return _checked(await anext(requests))
        try:
            async with asyncio.timeout(timeout_s) as waiting:
                self._call.awaits(waiting)
                request = await anext(requests)
        except StopAsyncIteration:  # as gRPC ends one that begins too large a message
            if not self._call.is_complete:
                self._call.refused()
            raise
        except TimeoutError:
            if self._call.gives_way:
                raise CapacityError(
                    f"{self._method}: what was sent came more slowly than many other requests"
                ) from None
            raise PeerProtocolError(
                f"{self._method}: nothing was sent within {timeout_s:g} s"
            ) from None
        self._call.completed()
        return _checked(request)


async def _agree_on_versions(context: Any, service: str, *, streams_out: bool) -> Versions:
    """Tell a client what this process speaks, and return what the client speaks, if both understand
    each other.

    Raises:
        PeerVersionError: They do not.
    """
    theirs = versions.read(sent(context.invocation_metadata()))
    if isinstance(theirs, str) or not versions.own().understands(theirs):
        raise PeerVersionError(
            f"this {_NAMES.get(service, 'process')} speaks {versions.own()}; you speak {theirs}",
            hint=versions.HINT,
        )
    # In the end: with an only message a frame of its own would add half to the cost of the call.
    context.set_trailing_metadata(headers())
    if streams_out:
        await context.send_initial_metadata(headers())
    return theirs


async def _abort(context: Any, error: MxError) -> None:
    counters.add(counters.REFUSED, type(error).__name__)
    _log_refusal(context, error)
    # The versions too: a refused call has no other metadata.
    trailers = ((DETAIL_KEY, encode_detail(error)), *headers())
    await context.abort(code_of(error), status_text(error), trailing_metadata=trailers)


def _log_refusal(context: Any, error: MxError) -> None:
    """Log an error; at debug level that a model or source is unknown, which clients poll for."""
    is_absent = isinstance(error, UnknownModelError | UnknownSourceError)
    level = logging.DEBUG if is_absent else logging.INFO
    if not _log.isEnabledFor(level):
        return
    peer, kind = context.peer(), type(error).__name__
    # Whose address it is and which error: such a cause is one line in a while.
    held_back = _refusals.passes((("peer", address_of_peer(peer)), ("error", kind)))
    if held_back is not None:
        more = {"held_back": held_back} if held_back else {}
        event(
            _log,
            "request.refused",
            level=level,
            peer=peer,
            error=kind,
            text=error.message[:500],
            **more,
        )


async def _drain(requests: AsyncIterator[object], most: int = _DRAIN_MESSAGES) -> None:
    """Discard what a client sends, `most` messages and for a while at most, before it gets a
    refusal.

    A client of grpc.aio whose call ends while it still writes may report INTERNAL ("Internal
    error from Core") instead of the status that it was sent.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            for _ in range(most):
                if await anext(aiter(requests), None) is None:
                    return


def _method_handler(
    method: MethodDescriptor, service: Service, calls: Calls, *, is_ours: bool = True
) -> Any:
    behaviour: Any = getattr(service.servicer, method.name)
    streams_in, streams_out = method.client_streaming, method.server_streaming
    name = method.containing_service.name

    def malformed() -> MxError:
        return PeerProtocolError(f"{method.full_name}: malformed {method.input_type.name}")

    async def refuse(context: Any, error: MxError) -> None:
        service.on_refused(context, error)
        await _abort(context, error)

    async def incoming(requests: Any, context: Any, call: ServerCall) -> Any:
        if is_ours:
            try:
                spoken = await _agree_on_versions(context, name, streams_out=streams_out)
            except MxError:
                if streams_in:  # its first message is under way
                    await _drain(requests, *((1,) if streams_out else ()))
                raise
            try:
                service.on_call(context, spoken)
            except MxError:  # it may do nothing here, and is not read
                call.refused()
                raise
        checked = _CheckedRequests(requests, call, method.name, patient=is_ours)
        if streams_in:
            return checked
        async for request in checked:
            return request
        raise PeerProtocolError(f"{method.name}: no request was sent")

    async def answer(requests: Any, context: Any) -> Any:
        call = None
        try:
            call = calls.begin(context)
            response = await behaviour(await incoming(requests, context, call), context)
            call.sends(response.ByteSize())
            return response
        except MxError as error:
            if streams_in and call is not None and call.is_complete:
                await _drain(requests)
            await refuse(context, error)

    async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            call = calls.begin(context)
            async for response in behaviour(await incoming(requests, context, call), context):
                call.sends(response.ByteSize())
                yield response
                call.sent()
        except MxError as error:
            await refuse(context, error)

    async def write(requests: Any, context: Any) -> None:
        try:
            call = calls.begin(context)
            await behaviour(await incoming(requests, context, call), context)
        except MxError as error:
            await refuse(context, error)

    handler: Any = answer
    if streams_out:
        handler = stream if inspect.isasyncgenfunction(behaviour) else write
    # A single request is read as a stream of one message, which is the same on the wire: gRPC
    # itself would wait for it for ever.
    maker: Any = (
        grpc.stream_stream_rpc_method_handler
        if streams_out
        else grpc.stream_unary_rpc_method_handler
    )
    return maker(
        handler,
        request_deserializer=parser(method.input_type, malformed),
        response_serializer=GetMessageClass(method.output_type).SerializeToString,
    )


def _add(server: grpc.aio.Server, service: Service, calls: Calls, *, is_ours: bool = True) -> None:
    """Add a service; one that is not ours knows no versions, and may lack methods."""
    handlers = {
        method.name: _method_handler(method, service, calls, is_ours=is_ours)
        for method in service.descriptor.methods
        if is_ours or _is_async(getattr(service.servicer, method.name))
    }
    name = service.descriptor.full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


def _is_async(behaviour: object) -> bool:
    return inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)


class _UnknownMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Answers calls to methods of mx that this process lacks: what has renamed or added them may
    be of another version, and is to learn that."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if not details.method.startswith("/mx."):
            return None
        maker: Any = grpc.stream_stream_rpc_method_handler
        return maker(self._refuse)

    @staticmethod
    async def _refuse(requests: Any, context: Any) -> None:
        del requests
        try:
            await _agree_on_versions(context, "", streams_out=False)
        except MxError as error:
            await _abort(context, error)
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")


async def _add_health(server: grpc.aio.Server, names: Sequence[str], calls: Calls) -> Any:
    """Add health checking and reflection, if their packages are installed."""
    try:
        health: Any = importlib.import_module("grpc_health.v1.health")
        health_pb2: Any = importlib.import_module("grpc_health.v1.health_pb2")
        reflection: Any = importlib.import_module("grpc_reflection.v1alpha.reflection")
        reflection_pb2: Any = importlib.import_module("grpc_reflection.v1alpha.reflection_pb2")
    except ImportError as error:
        _log.info("no health checking or reflection: %s", error)
        return None
    servicer = health.aio.HealthServicer()
    serving = 1  # HealthCheckResponse.SERVING
    for name in ("", *names):
        await servicer.set(name, serving)
    reflected = reflection.aio.ReflectionServicer(
        (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    )
    for module, implementation in ((health_pb2, servicer), (reflection_pb2, reflected)):
        (descriptor,) = module.DESCRIPTOR.services_by_name.values()
        _add(server, Service(descriptor, implementation), calls, is_ours=False)
    return servicer


async def listen(
    address: str,
    services: Sequence[Service],
    *,
    tls: TlsFiles | None = None,
    insecure: bool = False,
    dialled: str = "",
    access: Access | None = None,
    limits: Limits | None = None,
) -> Listening:
    """Serve `services` on this event loop, with health checking and reflection if installed.

    Args:
        address: HOST:PORT (port 0: any free one) or unix:PATH.
        services: The services.
        tls: Clients must show a certificate of this authority, and the server's certificate must
            name the host that they dial.
        insecure: Allow plain text beyond this machine.
        dialled: The host that clients dial; by default the one in `address`, unless that is a
            wildcard.
        access: Hears of each change of the authorities that clients' certificates are of.
        limits: What clients may have.

    Raises:
        ConfigError: The address is malformed, a PEM file cannot be read, or plain text beyond
            this machine is not allowed.
        NotAllowedError: No client would accept the certificate.
        LocalError: The address cannot be bound; the message names the port.
    """
    limits = limits or Limits()
    is_unix = address.startswith("unix:")
    if is_unix:
        remember_unix(address)
    host, port = ("", 0) if is_unix else split_address(address)
    require_protection(address, tls=tls, insecure=insecure, verb="listen on")
    if not is_unix:
        await require_free(host, port)
    files: ServerFiles | None = None
    if tls is not None:
        from mx.wire.reloading import ServerFiles  # without TLS it is not needed

        named = dialled or ("" if host in WILDCARDS else host)
        files = ServerFiles(tls, named, *((access.trust,) if access is not None else ()))
    aged: list[tuple[str, int]] = []
    if tls is not None and tls.connection_age_s:
        names = ("grpc.max_connection_age_ms", "grpc.max_connection_age_grace_ms")
        parts_ms = (int(part * tls.connection_age_s * 1000) for part in _AGE_PARTS)
        aged = list(zip(names, parts_ms, strict=True))
    options = (
        *_SERVER_OPTIONS,
        *aged,
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        # gRPC refuses a larger request by what its first bytes say, since 1.82.2.
        ("grpc.max_receive_message_length", limits.request_nbytes),
        ("grpc.max_allowed_incoming_connections", most_connections()),
    )
    server = grpc.aio.server(options=options)
    calls = Calls(limits)
    for service in services:
        _add(server, service, calls)
    server.add_generic_rpc_handlers((_UnknownMethods(),))
    upkeep: Upkeep | None = None
    try:
        health = await _add_health(
            server, [service.descriptor.full_name for service in services], calls
        )
        try:
            if files is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, files.credentials())
            upkeep = Upkeep(0 if is_unix else port, calls, _refusals)
        except (RuntimeError, OSError) as error:
            why = why_not_unix(address.removeprefix("unix:")) if is_unix else ""
            raise LocalError(f"cannot listen on {address}: {why or error}") from error
        await server.start()
    except BaseException:
        if upkeep is not None:
            upkeep.stop()
        await uncut(server.stop(0))  # else gRPC logs that its loop is gone
        raise
    runtime.stop_at_exit(server)
    upkeep.start()
    if files is not None:
        files.start()
    found = address if is_unix else join_address(host, port)
    return Listening(server, found, port, health, upkeep, files)
