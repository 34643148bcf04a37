"""TLS for data connections: mutual, 1.3 only, against the users' own CA.

Files may be replaced while they are in use: each connection is made with those that are there.
"""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from mx.core.policy import subject_shown
from mx.errors import ConfigError, NotAllowedError
from mx.revocations import is_revoked
from mx.tls import new_context
from mx.transport import TlsFiles

log = logging.getLogger(__name__)

_lock = threading.Lock()
#: The contexts of the files that were used last, the state that those had then, and until when they
#: are used without another look at the files.
_made: dict[tuple[TlsFiles, bool], tuple[object, ssl.SSLContext, float]] = {}
_MOST_MADE = 32
#: Files that could not be used are tried again after this.
AGAIN_S = 10.0


def tls_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """Return a context that shows `files.certificate` and requires one signed by `files.authority`.

    A context of the accepting side compares no names: who the reader is decides (`principal`). On
    the other side the caller names the host that the certificate must name. Files that were
    replaced are read again; if they can't be used, as while they are being replaced or where the
    certificate is not valid yet, the context is that of before.

    Args:
        files: The PEM files.
        server: Whether the context is for the side that accepts.

    Raises:
        ConfigError: A file is missing, or is not what it should be.
    """
    state = files.state()
    with _lock:
        known, now_s, until_s = _made.get((files, server)), time.monotonic(), math.inf
        if known is not None and known[0] == state and now_s < known[2]:
            return known[1]
        try:
            context = _context(files, server=server)
            if known is not None:
                _require_begun(files.certificate)
        except ConfigError as error:
            if known is None:
                raise
            if known[0] != state:
                log.warning("the earlier certificate stays in use: %s", error)
            context, until_s = known[1], now_s + AGAIN_S
        _made.pop((files, server), None)
        _made[files, server] = state, context, until_s
        if len(_made) > _MOST_MADE:
            del _made[next(iter(_made))]
        return context


def principal(sock: ssl.SSLSocket, files: TlsFiles) -> str:
    """Return the principal that the other end's certificate names; "" if it names none, or is
    revoked."""
    try:
        return "" if is_revoked(sock, files) else subject_shown(sock.getpeercert() or {}).name
    except (NotAllowedError, ConfigError):
        return ""


def _require_begun(certificate: str) -> None:
    """Raise ConfigError for a certificate that is not valid yet, which peers would refuse."""
    from cryptography import x509  # without TLS it is not needed

    try:
        begins = x509.load_pem_x509_certificate(Path(certificate).read_bytes()).not_valid_before_utc
    except (OSError, ValueError):
        return  # replaced meanwhile, or not read by this library alone
    if begins > datetime.now(UTC):
        raise ConfigError(f"{certificate} is not valid yet", hint="check the clock")


def _context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    context = new_context(server=server)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = not server
    context.hostname_checks_common_name = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # Connections are never resumed.
    try:
        what = f"{files.certificate} with {files.key}"
        context.load_cert_chain(files.certificate, files.key)
        what = files.authority
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise ConfigError(
            f"TLS can't use {what}: {error.strerror or error}",
            hint="`tls_cert`, `tls_key` and `tls_ca` take PEM files",
        ) from error
    return context
