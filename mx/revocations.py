"""The revoked certificates that a process's file names, read again when that changes.

A file that can't be used, as while it is being replaced, is logged, and what the one before it
named holds further; also once that was to be replaced.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mx.core.certificates import Revocations, certificates_in, read_revocations, validity
from mx.errors import ConfigError
from mx.log import event
from mx.transport import TlsFiles

log = logging.getLogger(__name__)

_NONE = Revocations()
_MOST_BYTES = 16 << 20
#: A file that could not be used is tried again after this.
AGAIN_S = 10.0

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read: the files' state then, what holds, until when it does without another look,
    and why what is there now does not."""

    state: object
    revoked: Revocations
    until_s: float
    refused: str


_read: dict[TlsFiles, _Known] = {}


def current(tls: TlsFiles) -> Revocations:
    """Return what is revoked, on any thread; reads the file if it has changed.

    Raises:
        ConfigError: The file can't be used, and none could before.
    """
    if not tls.revocations:
        return _NONE
    with _lock:
        state, known = tls.state(), _read.get(tls)
        now, now_s = datetime.now(UTC), time.monotonic()
        if known is not None and known.state == state and now_s < known.until_s:
            return known.revoked
        try:
            found = _from_files(tls, now)
        except ConfigError as error:
            if known is None:
                raise
            if str(error) != known.refused:
                text = f"the revocations of before hold: {error}"
                event(log, "revocations.bad", level=logging.WARNING, text=text)
            found, until_s, refused = known.revoked, now_s + AGAIN_S, str(error)
        else:
            until_s, refused = now_s + found.until_s - now.timestamp(), ""
            event(log, "revocations.read", revoked=len(found.serials))
        _read[tls] = _Known(state, found, until_s, refused)
        return found


def _from_files(tls: TlsFiles, now: datetime) -> Revocations:
    try:
        with open(tls.revocations, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return read_revocations(data, certificates_in(Path(tls.authority).read_bytes()), now)
    except OSError as error:
        why = error.strerror
    except ConfigError as error:
        why = error.message
    hint = "docs/tls.md shows how lists of revoked certificates are made"
    raise ConfigError(f"`tls_crl` {tls.revocations}: {why}", hint=hint)


def is_revoked(sock: ssl.SSLSocket, tls: TlsFiles) -> bool:
    """Return True if the other end of a connection has shown a certificate that is revoked.

    Args:
        sock: The connection, after its handshake.
        tls: The files of this process.

    Raises:
        ConfigError: As `current`.
    """
    revoked = current(tls)
    shown = sock.getpeercert(binary_form=True)
    if not revoked.serials or shown is None:
        return False
    return validity([shown], frozenset(), revoked).revoked
