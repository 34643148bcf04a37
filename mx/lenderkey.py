"""What a name's owner lets the holder of another key do: lend, and bind or update nothing else.

A lender key is a key pair (Ed25519), and for each of its names a *certificate* that the name's key
pair has signed. Where a holder of the name key signs for weights, its holder signs with that key
pair, and the certificate goes along (`mx.namekey.LenderKey`).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from mx.core.ownership import SIGNATURE_BYTES, certificate_text
from mx.core.types import SourceRecord
from mx.errors import NotAllowedError
from mx.publickey import is_signed

#: What a lender key may be for: states of engines, which are variants with a processing key; and
#: what later releases lend.
STATES, KINDS = "states", ("states", "kv", "snapshots")


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the holder of a key pair may do. `public` is the public half, `kinds` are of `KINDS`,
    `expires_s` is in seconds since 1970. `principal` is who registers with it at a coordinator with
    TLS; "" for any."""

    public: bytes
    kinds: tuple[str, ...]
    expires_s: int
    principal: str = ""

    def encode(self) -> bytes:
        """Return the bytes that the owner signs (`mx.core.ownership.certificate_text`)."""
        fields = [self.public.hex(), list(self.kinds), self.expires_s, self.principal]
        return json.dumps(fields).encode()


def certified(source: SourceRecord) -> Certificate:
    """Return the certificate of a source that lends by a lender key.

    Raises:
        NotAllowedError: The owner has not signed it for this name, it has expired, or it is not for
            what the source lends.
    """
    name, variant = source.model.name, source.model.variant
    found = read(name, source.commitment, source.certificate)
    if STATES not in found.kinds or "=" not in variant:
        raise NotAllowedError(
            f"a lender key lends {' and '.join(map(str, found.kinds))} of {name}, which [{variant}]"
            " is not",
            hint="serve it with the owner's key (`name_key`)",
        )
    return found


def read(name: str, commitment: bytes, certificate: bytes) -> Certificate:
    """Return what the certificate of a lender key says.

    Args:
        name: The name that it is to be for.
        commitment: That of the name's owner.
        certificate: The owner's signature, and what it is of.

    Raises:
        NotAllowedError: The owner has not signed it for this name, or it has expired.
    """
    signature, said = certificate[:SIGNATURE_BYTES], certificate[SIGNATURE_BYTES:]
    if not is_signed(commitment, signature, certificate_text(name, said)):
        raise NotAllowedError(
            f"the lender key is not certified for {name}",
            hint="have the owner of the name make one with `mx keygen`",
        )
    try:
        public, kinds, expires_s, principal = json.loads(said)
        found = Certificate(bytes.fromhex(public), tuple(kinds), int(expires_s), str(principal))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise NotAllowedError(f"the lender key of {name} is of another version") from None
    if found.expires_s <= time.time():
        raise NotAllowedError(
            f"the lender key of {name} has expired",
            hint="have the owner of the name make a new one with `mx keygen`",
        )
    return found


def signer(source: SourceRecord) -> bytes:
    """Return the public key that has to sign for a source's weights: its commitment, or what a
    certificate names that its commitment has signed. b"" if that is not right, or has expired."""
    try:
        return certified(source).public if source.certificate else source.commitment
    except NotAllowedError:
        return b""


def check_lender(source: SourceRecord, principal: str | None, *, updates: bool) -> bytes:
    """Return the public key that has to sign for a registration by a lender key.

    Args:
        source: The source.
        principal: Who registers it, None without TLS.
        updates: Whether it would update its name.

    Raises:
        NotAllowedError: The certificate does not allow it.
    """
    found, model = certified(source), source.model
    if found.principal and found.principal != principal:
        raise NotAllowedError(
            f"the lender key of {model.name} is for {found.principal}, not for {principal}",
            hint="register with that certificate (`tls_cert`), or make a lender key for this one",
        )
    if updates:
        raise NotAllowedError(
            f"a lender key does not update {model.name}",
            hint="only the owner's key (`name_key`) does",
        )
    return found.public
