"""mx errors <-> gRPC statuses, so that an error arrives with the class that it was raised with.

The status code is for foreign clients; trailing metadata carries the name of the class, the
message and the hint. A peer may only cause errors that blame the peer or the request: `LocalError`
is never rebuilt, since it would blame this process.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from mx import errors
from mx.core import versions
from mx.core.versions import answered
from mx.errors import (
    BindingError,
    CapacityError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    CoordinatorVersionError,
    DigestError,
    IntegrityError,
    MxError,
    NoSourceError,
    NotAllowedError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerVersionError,
    SourceError,
    StaleGenerationError,
    UnknownModelError,
    UnknownSourceError,
)
from mx.text import plain
from mx.transport import TlsFiles
from mx.wire.address import host_of

DETAIL_KEY = "mx-error-bin"
# All trailing metadata share 8 KiB. These limits are in bytes as sent.
_MAX_DETAIL_BYTES = 3000
_MAX_TEXT_BYTES = 1000

#: The first class that fits decides, so subclasses come before their bases.
_CODES: tuple[tuple[type[MxError], grpc.StatusCode], ...] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (PeerProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (IntegrityError, grpc.StatusCode.INVALID_ARGUMENT),
    (UnknownModelError, grpc.StatusCode.NOT_FOUND),
    (UnknownSourceError, grpc.StatusCode.NOT_FOUND),
    (BindingError, grpc.StatusCode.ALREADY_EXISTS),
    # A client of version 1 does not know these classes: of this status it shows the whole text,
    # and does not try again.
    (PeerVersionError, grpc.StatusCode.PERMISSION_DENIED),
    (CoordinatorVersionError, grpc.StatusCode.PERMISSION_DENIED),
    (NotAllowedError, grpc.StatusCode.PERMISSION_DENIED),
    (PeerRefusedError, grpc.StatusCode.PERMISSION_DENIED),
    (StaleGenerationError, grpc.StatusCode.FAILED_PRECONDITION),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NoSourceError, grpc.StatusCode.UNAVAILABLE),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
    (CoordinatorError, grpc.StatusCode.FAILED_PRECONDITION),
    (MxError, grpc.StatusCode.INTERNAL),
)


#: Words in gRPC's message where what listens does not speak HTTP/2.
_OTHER_PROTOCOL = ("http1.x", "http2 frame", "unexpected content", "parsing http/2")
#: gRPC's whole messages for calls that a server cuts off when it stops.
_STOPPED = ("cancelled", "cancelling all calls", "internal error from core")
_NO_SUCH_NAME = ("name not found", "dns resolution failed", "errors resolving")


class Role(enum.Enum):
    COORDINATOR = "coordinator"
    SOURCE = "source"
    CACHE = "cache"  # its errors are those of a source


class Remote(NamedTuple):
    """A process that mx calls: its role decides which error is raised if it does not answer, its
    address names it in messages, and `tls` are the files used for the connection."""

    role: Role
    address: str
    tls: TlsFiles | None = None


def code_of(error: MxError) -> grpc.StatusCode:
    """Return the status code that a foreign client sees for `error`."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def encode_detail(error: MxError) -> bytes:
    """Return the metadata from which `translate` rebuilds the error."""
    half = _MAX_DETAIL_BYTES // 2
    detail = {
        "error": type(error).__name__,
        "message": _cut(error.message, half),
        "hint": _cut(error.hint, half),
    }
    return json.dumps(detail).encode()


def status_text(error: MxError) -> str:
    """Return the error as one line for foreign clients.

    It is bounded, since gRPC sends three bytes for each byte that is not ASCII.
    """
    return _cut(" ".join(str(error).split()), _MAX_TEXT_BYTES)


def _cut(text: str, limit: int) -> str:
    """Return the beginning of a text, of at most `limit` bytes in JSON with escapes."""
    text = text[:limit]
    while len(json.dumps(text)) > limit:
        text = text[: len(text) * limit // len(json.dumps(text))]
    return text


def _rebuild(data: bytes, remote: Remote) -> MxError | None:
    try:
        detail = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(detail, dict):
        return None
    name, message, hint = detail.get("error"), detail.get("message"), detail.get("hint", "")
    if not (isinstance(name, str) and isinstance(message, str) and isinstance(hint, str)):
        return None
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or issubclass(kind, errors.LocalError):
        return None
    message, hint = plain(message), plain(hint)
    if issubclass(kind, PeerVersionError | CoordinatorVersionError):
        return _version_error(remote, message, hint)
    if issubclass(kind, SourceError | DigestError):
        return kind(message, peer=remote.address, hint=hint)
    if issubclass(kind, UnknownModelError) and remote.role is Role.COORDINATOR:
        # Which one was asked is what users get wrong: often another than they think.
        return kind(f"the coordinator at {remote.address}: {message}", hint=hint)
    if issubclass(kind, CoordinatorError | ConfigError | IntegrityError):
        return kind(message, hint=hint)
    return None


#: How gRPC wraps the operating system's message about a connection.
_NOT_CONNECTED = re.compile(r"Failed to connect to remote host: (?:getsockopt\(SO_ERROR\): )?(.+)$")


#: Parts of what gRPC says of a connection, in lower case, and the same in plain words.
_OF_GRPC = {
    "timed out before receiving settings": "it accepted the connection and said nothing",
    "connection timed out": "the connection was not accepted in time",
    "connect timeout": "the connection was not accepted in time",
    "fd shutdown": "the connection was not accepted in time",
    "ping timeout": "it stopped answering",
    "keepalive": "it stopped answering",
    "reset by peer": "it closed the connection",
    "socket closed": "it closed the connection",
    "broken pipe": "it closed the connection",
    "endpoint closing": "it closed the connection",
    "goaway": "it closed the connection",
    "http2 header with status": "it answers as a web server does",
}
_BEFORE_THE_CAUSE = re.compile(
    r"failed to connect to all addresses; last error: (?:[A-Z_]+: )?(?:(?:ipv[46]|unix):\S+: )?"
)


def in_plain_words(said: str) -> str:
    """Return what gRPC says of a connection without its own words."""
    lowered = said.lower()
    for part, words in _OF_GRPC.items():
        if part in lowered:
            return words
    return _BEFORE_THE_CAUSE.sub("", said)


def _first_line(text: str | None) -> str:
    lines = (text or "").strip().splitlines()
    if not lines:
        return "no details"
    if lines[0].startswith("Stream removed"):
        return "it closed the connection"
    refused = _NOT_CONNECTED.search(lines[0])
    return plain((refused[1].lower() if refused else lines[0])[:300])


def _silent(remote: Remote, said: str) -> MxError:
    """Return the error for an address at which no mx process answers."""
    lowered, said = said.lower(), in_plain_words(said)
    if any(sign in lowered for sign in _OTHER_PROTOCOL):
        return foreign(remote, "something else listens there, such as a web server")
    if any(sign in lowered for sign in _NO_SUCH_NAME):
        message = (
            f"the {remote.role.value}'s name {host_of(remote.address)} is not known here (DNS)"
        )
        if remote.role is Role.COORDINATOR:
            return CoordinatorError(message, hint="check `coordinator`, or give an address")
        return PeerLostError(message, peer=remote.address, hint="check it, or give an address")
    # "Handshake read failed" is not a refusal: a stopped process causes it.
    if any(sign in lowered for sign in ("ssl", "certificate", "handshake failed")):
        hint = "check `tls_cert`, `tls_key` and `tls_ca` on both sides"
        message = f"no secure connection to {remote.address}: {said}"
        if remote.role is Role.COORDINATOR:
            return NotAllowedError(message, hint=hint)
        return PeerRefusedError(message, peer=remote.address, hint=hint)
    tls = ""
    # The symptoms of a plain client at a TLS port, and of a TLS client at a plain one.
    refused = "failed to connect" in lowered and "reset by peer" in lowered
    if refused or "socket closed" in lowered or "handshake" in lowered:
        tls = "; check also that both ends use TLS of one authority, or both `insecure`"
    if remote.role is Role.COORDINATOR:
        return CoordinatorError(
            f"no coordinator answers at {remote.address}: {said}",
            hint="start one with mx-coordinator (mx serve alone is one too), or name another with "
            "`coordinator`" + tls,
        )
    hint = "mx sources lists the sources" + tls
    if remote.role is Role.CACHE:
        hint = "if it has ended, start it again"
    return PeerLostError(
        f"the {remote.role.value} at {remote.address} does not answer: {said}",
        peer=remote.address,
        hint=hint,
    )


def foreign(remote: Remote, said: str) -> MxError:
    """Return the error for a process that answers, but not as an mx process does.

    Args:
        remote: The process.
        said: What it answered.
    """
    said = in_plain_words(said)
    message = f"the process at {remote.address} is not an mx {remote.role.value}: {said}"
    if remote.role is Role.COORDINATOR:
        return CoordinatorError(message, hint="check the port, and `coordinator`")
    known = "check the port; a coordinator's is for `coordinator`"
    hint = known if remote.role is Role.SOURCE else ""
    return PeerProtocolError(message, peer=remote.address, hint=hint)


def _version_error(remote: Remote, message: str, hint: str) -> MxError:
    if remote.role is Role.COORDINATOR:
        return CoordinatorVersionError(message, hint=hint)
    return PeerVersionError(message, peer=remote.address, hint=hint)


def check_versions(texts: Sequence[str], remote: Remote, said: str = "") -> None:
    """Raise an error unless the process that answers and this one understand each other.

    Args:
        texts: What `mx.core.versions.answered` returns for it.
        remote: The process that answered.
        said: What it said, if the answer is an error.

    Raises:
        CoordinatorVersionError: A coordinator speaks other versions.
        PeerVersionError: A source does.
    """
    theirs = versions.mismatch(texts)
    if theirs is not None:
        message = (
            f"the {remote.role.value} at {remote.address} speaks {theirs}; this mx speaks "
            f"{versions.own()}"
        )
        if said and theirs not in said:  # else it is a refusal that says the same
            message += f"; it answered: {said}"
        raise _version_error(remote, message, versions.HINT)


def planned_here(version: int, what: str, remote: Remote) -> None:
    """Raise an error unless this process plans a layout version.

    Args:
        version: The layout version.
        what: Whose it is, for the message.
        remote: Who says so.

    Raises:
        CoordinatorVersionError: It does not, and a coordinator has said so.
        PeerVersionError: It does not, and a source has said so.
    """
    if version not in versions.own().layout:
        message = f"{what} in layout {version}; this mx plans layout {versions.own().layout}"
        raise _version_error(remote, message, versions.HINT)


def of_other_versions(
    initial: Any, trailing: Any, details: str | None, remote: Remote
) -> MxError | None:
    """Return the error for a failed RPC if the process that failed it speaks other versions.

    What gRPC itself says, of a failed connection or for a server that is not mx, has no versions
    and no error of mx: of that nothing is known.

    Args:
        initial: The metadata that the answer began with, if any.
        trailing: The metadata that it ended with.
        details: What it said.
        remote: The process.
    """
    texts = answered(initial, trailing)
    if not texts and not any(key == DETAIL_KEY for key, _ in trailing or ()):
        return None
    try:
        check_versions(texts, remote, _first_line(details))
    except MxError as other:
        return other
    return None


def _late(remote: Remote) -> MxError:
    message = f"the {remote.role.value} at {remote.address} did not answer in time"
    if remote.role is Role.COORDINATOR:
        return CoordinatorError(message, hint="it may be overloaded or stopped; try again")
    return PeerTimeoutError(message, peer=remote.address)


def _refused(remote: Remote, said: str) -> MxError:
    message = f"{remote.address} refused: {said}"
    if remote.role is Role.COORDINATOR:
        return NotAllowedError(message)
    return PeerRefusedError(message, peer=remote.address)


def translate(error: grpc.RpcError, *, who: Remote | str) -> MxError:
    """Return the mx error for a failed RPC.

    Args:
        error: What gRPC raised.
        who: The process that was called; a string is the address of a source.
    """
    if isinstance(who, str):
        who = Remote(Role.SOURCE, who)
    if not isinstance(error, grpc.aio.AioRpcError):
        return foreign(who, _first_line(str(error)))
    trailing: Any = error.trailing_metadata() or ()
    other = of_other_versions(error.initial_metadata(), trailing, error.details(), who)
    if other is not None:
        return other
    for key, value in trailing:
        if key == DETAIL_KEY and isinstance(value, bytes):
            rebuilt = _rebuild(value, who)
            if rebuilt is not None:
                return rebuilt
    code, said = error.code(), _first_line(error.details())
    if said.lower() in _STOPPED:
        code, said = grpc.StatusCode.UNAVAILABLE, "it was stopped meanwhile"
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return _silent(who, said)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return _late(who)
        case grpc.StatusCode.NOT_FOUND:
            return UnknownModelError(f"{who.address}: {said}")
        case grpc.StatusCode.ALREADY_EXISTS:
            return BindingError(f"{who.address}: {said}")
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return _refused(who, said)
        case grpc.StatusCode.UNIMPLEMENTED:
            return foreign(who, said)
        case _:
            message = f"the {who.role.value} at {who.address} failed: {code.name}: {said}"
            if who.role is Role.COORDINATOR:
                return CoordinatorError(message)
            return PeerProtocolError(message, peer=who.address)


@contextmanager
def translating(who: Remote | str) -> Iterator[None]:
    """Raise mx errors instead of gRPC's for failed RPCs and answers that do not parse.

    Args:
        who: The process that is called; a string is the address of a source.
    """
    if isinstance(who, str):
        who = Remote(Role.SOURCE, who)
    try:
        yield
    except grpc.RpcError as error:
        raise translate(error, who=who) from None
    except DecodeError as error:
        raise foreign(who, "its answer does not parse") from error
