"""Finds out what is wrong with certificates, at the end that has to correct it.

gRPC reports only that a handshake failed. So a process tests its own files with a handshake in
memory before it uses them, and repeats a failed handshake with the other end through Python's
`ssl`, which reports the reason.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from google.protobuf.message import DecodeError

from mx.errors import (
    ConfigError,
    MxError,
    NotAllowedError,
    PeerUntrustedError,
)
from mx.runtime import in_thread
from mx.transport import TlsFiles
from mx.wire.address import read_tls, split_address
from mx.wire.status import Remote, Role, foreign, translate

if TYPE_CHECKING:
    from mx.core.policy import Subject

_PROBE_TIMEOUT_S = 2.0
_BOTH_SIDES = "set `tls_cert`, `tls_key` and `tls_ca` on both sides, of one CA"
_RECIPE = "docs/tls.md shows how certificates are made"
#: X509_V_ERR_ numbers of OpenSSL.
_NOT_YET_VALID, _EXPIRED, _PURPOSE = 9, 10, 26
_UNTRUSTED = (2, 18, 19, 20, 21)
_OTHER_NAME = (62, 64)
#: Words in gRPC's message if TLS may be the reason.
_SIGNS = ("handshake", "ssl", "tls", "certificate", "verification", "closed", "reset", "http/2")


def check_server_files(tls: TlsFiles, host: str = "") -> Subject:
    """Refuse files with which no client would accept this server.

    Args:
        tls: The files.
        host: The host that clients dial; "" accepts a certificate that names any host.

    Returns:
        Whom the certificate names.

    Raises:
        ConfigError: A file cannot be read or is not PEM.
        NotAllowedError: The certificate and the key are not a pair, or the certificate has
            expired, is not signed by the authority, is not for servers, or names other hosts, or
            several processes.
    """
    return _check(tls, tls.state(), host, server=True)


def check_client_files(tls: TlsFiles) -> Subject:
    """Refuse files with which no server would accept this client; return whom they name.

    Raises:
        ConfigError: As `check_server_files`.
        NotAllowedError: As `check_server_files`; the certificate must be for clients.
    """
    return _check(tls, tls.state(), "", server=False)


@functools.lru_cache(maxsize=64)
def _check(tls: TlsFiles, state: object, host: str, *, server: bool) -> Subject:
    del state
    read_tls(tls)
    if tls.revocations:
        from mx import revocations  # few name such a file

        revocations.current(tls)
    accepting, dialling = _context(tls, server=True), _context(tls, server=False)
    checker = dialling if server else accepting
    checker.verify_mode = ssl.CERT_REQUIRED
    what = f"`tls_cert` {tls.certificate}"
    try:
        client, accepted = _shake_hands(accepting, dialling)
        shown = client if server else accepted
        if server and not _names(shown):
            raise NotAllowedError(
                f"{what} has no subjectAltName: it names no host that clients could compare",
                hint=_RECIPE,
            )
        from mx.core.policy import subject_shown  # without TLS it is not needed

        try:
            subject = subject_shown(shown.getpeercert() or {})
        except NotAllowedError as error:
            raise NotAllowedError(f"{what} {error.message}", hint=error.hint) from None
        if server and not subject.hosts:
            raise NotAllowedError(
                f"{what} names {subject.name}, and no host that clients could compare",
                hint=f"a server's certificate has a DNS name or an address, too; {_RECIPE}",
            )
        if host:
            dialling.check_hostname = True
            _shake_hands(accepting, dialling, host)
        return subject
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            raise NotAllowedError(
                f"{what} does not name {host}, where others dial this process: it names "
                f"{', '.join(_names(shown))}",
                hint="listen at one of these, or set `advertise` to one, if this command has it; "
                f"{_RECIPE}",
            ) from None
        why = _why(error, tls, of_server=server)
        raise NotAllowedError(f"{what} {why}", hint=_RECIPE) from None
    except ssl.SSLError as error:
        raise NotAllowedError(f"{what} can't be used: {_reason(error)}", hint=_RECIPE) from None


def _context(tls: TlsFiles, *, server: bool) -> ssl.SSLContext:
    from mx.tls import new_context  # without TLS it is not needed

    context = new_context(server=server)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.hostname_checks_common_name = False

    def no_password() -> str:
        raise ConfigError(f"`tls_key` {tls.key} is encrypted", hint="give one without a password")

    try:
        context.load_verify_locations(tls.authority)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`tls_ca` {tls.authority} can't be used: {_reason(error)}") from None
    try:
        context.load_cert_chain(tls.certificate, tls.key, no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise NotAllowedError(
                f"`tls_key` {tls.key} is not the key of `tls_cert` {tls.certificate}",
                hint="give the two that were made together",
            ) from None
        raise ConfigError(
            f"`tls_cert` {tls.certificate} with `tls_key` {tls.key} can't be used: {_reason(error)}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"`tls_cert` {tls.certificate}: {_reason(error)}") from None
    return context


def _shake_hands(
    accepting: ssl.SSLContext, dialling: ssl.SSLContext, host: str | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Do a handshake in memory; return the client's side and the server's. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = accepting.wrap_bio(to_server, to_client, server_side=True)
    client = dialling.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [client, server]
    while waiting:
        for side in tuple(waiting):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
                waiting.remove(side)
    return client, server


def _names(side: ssl.SSLObject | ssl.SSLSocket) -> list[str]:
    """Return all that the other end's certificate names; nothing if it was not verified."""
    shown = side.getpeercert() or {}
    entries = shown.get("subjectAltName", ())
    return [str(entry[1]) for entry in entries if isinstance(entry, tuple) and len(entry) == 2]


def _why(error: ssl.SSLCertVerificationError, tls: TlsFiles, *, of_server: bool) -> str:
    """Return what is wrong with a certificate, as the end of a sentence about it."""
    code = error.verify_code
    if code == _EXPIRED:
        return "has expired"
    if code == _NOT_YET_VALID:
        return "is not valid yet: check the clock"
    if code in _UNTRUSTED:
        return f"is not signed by an authority in `tls_ca` {tls.authority}"
    if code == _PURPOSE:
        use = "serverAuth" if of_server else "clientAuth"
        return f"may not be used for this: its extendedKeyUsage lacks {use}"
    return f"is not valid: {error.verify_message}"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


# -- the other end ------------------------------------------------------------------------------


@asynccontextmanager
async def diagnosing(who: Remote) -> AsyncIterator[None]:
    """Translate errors as `mx.wire.status.translating`; if TLS may be at fault, add the reason."""
    try:
        yield
    except grpc.RpcError as error:
        raise await diagnose(error, who) from None
    except DecodeError as error:
        raise foreign(who, "its answer does not parse") from error


async def diagnose(error: grpc.RpcError, who: Remote) -> MxError:
    """Return the mx error for a failed RPC to `who`; connects again if TLS may be at fault."""
    translated = translate(error, who=who)
    if not isinstance(error, grpc.aio.AioRpcError) or who.address.startswith("unix:"):
        return translated
    said = (error.details() or "").lower()
    if error.code() is not grpc.StatusCode.UNAVAILABLE or not any(s in said for s in _SIGNS):
        return translated
    found = await in_thread(_probe, who.address, who.tls)
    if found is None:
        return translated
    message = f"no secure connection to the {who.role.value} at {who.address}: {found}"
    if who.role is Role.COORDINATOR:
        return NotAllowedError(message, hint=_BOTH_SIDES)
    return PeerUntrustedError(message, peer=who.address, hint=_BOTH_SIDES)


def _probe(address: str, tls: TlsFiles | None) -> str | None:
    """Return the fault of TLS there; None if there is none, or nothing answers. Blocks."""
    host, port = split_address(address)
    try:
        context = _probing(tls)
        with (
            socket.create_connection((host, port), _PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as sock,
        ):
            if tls is None:
                return "it requires TLS"
            names = _names(sock)
            if not names:
                return "its certificate has no subjectAltName: it names no host"
            if not _named(host, port, tls):
                return f"its certificate does not name {host}: it names {', '.join(names)}"
            return _refused(sock, tls)
    except ssl.SSLCertVerificationError as error:
        assert tls is not None  # else nothing is verified
        return f"its certificate {_why(error, tls, of_server=True)}"
    except ssl.SSLError as error:
        if tls is not None and error.reason == "WRONG_VERSION_NUMBER":
            return "it answers without TLS"
        return None
    except (OSError, MxError):
        return None


def _probing(tls: TlsFiles | None) -> ssl.SSLContext:
    if tls is None:
        from mx.tls import new_context

        context = new_context(server=False)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context = _context(tls, server=False)
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(["h2"])
    return context


def _named(host: str, port: int, tls: TlsFiles) -> bool:
    context = _probing(tls)
    context.check_hostname = True
    try:
        with (
            socket.create_connection((host, port), _PROBE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True
    except ssl.SSLCertVerificationError as error:
        return error.verify_code not in _OTHER_NAME


def _refused(sock: ssl.SSLSocket, tls: TlsFiles) -> str | None:
    """Return why a server rejects our certificate after the handshake, or None if it accepts it:
    then it sends the first byte."""
    why = "it closed the connection"
    try:
        if sock.recv(1):
            return None
    except ssl.SSLError as error:
        why = _reason(error)
    except ConnectionError:
        pass
    return f"it does not accept `tls_cert` {tls.certificate} ({why}): check its `tls_ca`"
