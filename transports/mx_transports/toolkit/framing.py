"""The fixed-size, big-endian start of data connections; statuses; and tickets.

A reader connects and sends PREAMBLE: magic (which names the transport and, in its last byte, the
version), the key that names its grant, and the grant's secret. The source answers HELLO, with its
own magic; to another version with REFUSED. What follows is the transport's own.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

from mx.core.json_bounds import MAX_TICKET_PARSED_BYTES, check_json
from mx.errors import (
    PathError,
    PeerProtocolError,
    PeerRefusedError,
    PeerUntrustedError,
    SourceError,
    StaleGenerationError,
)

MAGIC_BYTES = 8
KEY_BYTES = 16
SECRET_BYTES = 32
PREAMBLE = struct.Struct("!8s16s32s")
HELLO = struct.Struct("!8sI")
MAX_U32, MAX_U64 = (1 << 32) - 1, (1 << 64) - 1

#: Statuses, in HELLO and in what transports answer.
OK = 0
REFUSED = 1
STALE = 2
OUT_OF_RANGE = 3
FULL = 4
#: No answer yet, but one will follow.
WAITING = 5
#: Only in HELLO, over TLS: the grant is another certificate's.
NOT_YOURS = 6

STATUS_TEXT = {
    REFUSED: "the source does not know the ticket, or has withdrawn it",
    STALE: "the source's memory has changed since the read was planned",
    OUT_OF_RANGE: "the source says that the read lies outside of what it registered",
    FULL: "the source has too many connections for this grant",
    NOT_YOURS: "the grant is for another certificate than the one shown, or that is revoked",
}
_ERRORS = {STALE: StaleGenerationError, NOT_YOURS: PeerUntrustedError}


def check_magic(magic: bytes, spoken: bytes, where: str, peer: str) -> None:
    """Check the magic of a source's HELLO.

    Args:
        magic: What this process speaks: the transport, and its version in the last byte.
        spoken: What the source speaks.
        where: What the message begins with.
        peer: Whom the error names.

    Raises:
        PathError: It is another version of the transport.
        PeerProtocolError: It is something else.
    """
    if spoken == magic:
        return
    if spoken[:-1] != magic[:-1]:
        raise PeerProtocolError(f"{where} does not speak this transport", peer=peer)
    raise PathError(
        f"{where} speaks version {spoken[-1]} of this transport; this mx speaks {magic[-1]}",
        peer=peer,
        hint="run the same version of mx on both sides",
    )


def refusal(status: int, peer: str) -> SourceError:
    """Return the error that stands for a status other than OK.

    Args:
        status: One of the above, or any other number that the peer sent.
        peer: Whom the error names.
    """
    kind = _ERRORS.get(status, PeerRefusedError)
    return kind(f"{peer}: {STATUS_TEXT.get(status, f'refused ({status})')}", peer=peer)


class Ticket(NamedTuple):
    """What a source returns for a grant. `fields` are the transport's own; the secret is never
    logged."""

    key: bytes
    secret: bytes
    fields: dict[str, object]

    def encode(self) -> bytes:
        """Return the ticket as `mx.transport.Exposure.grant` returns it."""
        document = {**self.fields, "key": self.key.hex(), "secret": self.secret.hex()}
        return json.dumps(document).encode()

    def __repr__(self) -> str:
        return f"Ticket(key={self.key.hex()})"


def decode_ticket(data: bytes, peer: str) -> Ticket:
    """Return the ticket that bytes from `peer` encode.

    Args:
        data: The bytes, which may be anything.
        peer: Whom errors name.

    Raises:
        PeerProtocolError: The ticket is malformed. The types of its fields are not checked.
    """
    try:
        check_json(data, most_nbytes=MAX_TICKET_PARSED_BYTES)
        document = json.loads(data)
        key, secret = bytes.fromhex(document.pop("key")), bytes.fromhex(document.pop("secret"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        key, secret, document = b"", b"", {}
    if len(key) != KEY_BYTES or len(secret) != SECRET_BYTES or not isinstance(document, dict):
        raise PeerProtocolError(f"{peer} handed out a ticket that can't be read", peer=peer)
    return Ticket(key, secret, document)
