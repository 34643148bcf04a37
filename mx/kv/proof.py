"""How the two ends of a KV stream show each other that they hold the key of the model's name.

Each signs both nonces with the name's key pair, or with that of a lender key whose certificate is
for KV. Contents of KV blocks can't be checked without computing them, so nothing else makes them
believable; and they are what users have asked, so no other may read them.
"""

from __future__ import annotations

import hmac
import math
import os

from blake3 import blake3

from mx import lenderkey
from mx.core.digest import DIGEST_BYTES
from mx.core.ownership import MAX_CERTIFICATE_BYTES
from mx.errors import ConfigError, NotAllowedError
from mx.namekey import NameKey
from mx.publickey import is_signed
from mx.wire.v1 import kv_pb2 as pb

NONCE_BYTES = 16
_DOMAIN = b"mx kv stream, version 1"
#: The two ends.
READER, POOL = b"reader", b"pool"


def nonce() -> bytes:
    """Return a new nonce."""
    return os.urandom(NONCE_BYTES)


def secret_of(key: NameKey, name: str) -> bytes:
    """Return what the names of a model's KV blocks are keyed with, 32 bytes.

    Raises:
        ConfigError: The key is a lender key that is not for them.
    """
    secret = key.kv_secret(name)
    if not secret:
        raise ConfigError(
            f"the lender key is not for the KV blocks of {name}",
            hint="have the owner of the name make one with `mx keygen`, as a lender key for kv",
        )
    return secret


def prove(key: NameKey, name: str, end: bytes, nonces: tuple[bytes, bytes]) -> pb.KvProof:
    """Return what shows that this end holds a name's key.

    Args:
        key: The key.
        name: The model's name.
        end: READER or POOL.
        nonces: The reader's, and the pool's.
    """
    text = _text(name, end, nonces)
    return pb.KvProof(certificate=key.certificate(name), signature=key.sign(name, text))


def check(
    proof: pb.KvProof,
    key: NameKey,
    name: str,
    end: bytes,
    nonces: tuple[bytes, bytes],
    principal: str | None = None,
) -> float:
    """Check what the other end shows; the arguments are as for `prove`, and whom the other end's
    TLS certificate names, None where that is not known.

    Returns:
        Until when it counts, in seconds since 1970.

    Raises:
        NotAllowedError: It does not hold the key of the name that this end's key owns, or a lender
            key of that for KV.
    """
    public, until_s = key.commitment(name), math.inf
    if len(nonces[0]) != NONCE_BYTES or len(proof.certificate) > MAX_CERTIFICATE_BYTES:
        raise NotAllowedError("it does not prove as a holder of a name key does")
    if proof.certificate:
        certificate = lenderkey.read(name, public, proof.certificate)
        if "kv" not in certificate.kinds:
            raise NotAllowedError(
                f"the lender key is not for the KV blocks of {name}",
                hint="have the owner of the name make one with `mx keygen`, as a lender key for kv",
            )
        if principal is not None and certificate.principal not in ("", principal):
            whom = principal or "one that connects without TLS"
            raise NotAllowedError(
                f"the lender key of {name} is for {certificate.principal}, not for {whom}",
                hint="connect with that certificate (`tls_cert`), or make another lender key",
            )
        public, until_s = certificate.public, float(certificate.expires_s)
    if not is_signed(public, proof.signature, _text(name, end, nonces)):
        raise NotAllowedError(
            f"the KV blocks of {name} are for holders of its name key alone",
            hint="give both the same key (`name_key`), or one a lender key of the other's",
        )
    return until_s


class Seal:
    """Seals what a pool tells one reader, message by message: who relays a stream, and has no key,
    could else read by its tickets, and have other blocks believed. Each end has one."""

    def __init__(self, key: NameKey, name: str, nonces: tuple[bytes, bytes]) -> None:
        """The arguments are as for `prove`."""
        self._key = blake3(_text(name, b"seal", nonces), key=secret_of(key, name)).digest()
        self._number = 0

    def close(self, message: bytes) -> bytes:
        """Return the next message, sealed."""
        tag_key, pad = self._next(len(message))
        hidden = _xor(message, pad)
        return blake3(hidden, key=tag_key).digest(DIGEST_BYTES) + hidden

    def open(self, sealed: bytes) -> bytes:
        """Return the next message. Raises NotAllowedError: the pool has not sealed it."""
        tag, hidden = sealed[:DIGEST_BYTES], sealed[DIGEST_BYTES:]
        tag_key, pad = self._next(len(hidden))
        if not hmac.compare_digest(blake3(hidden, key=tag_key).digest(DIGEST_BYTES), tag):
            raise NotAllowedError("what came of a KV pool's stream is not what the pool has sent")
        return _xor(hidden, pad)

    def _next(self, nbytes: int) -> tuple[bytes, bytes]:
        self._number += 1
        stream = blake3(self._number.to_bytes(8, "big"), key=self._key).digest(32 + nbytes)
        return stream[:32], stream[32:]


def _xor(message: bytes, pad: bytes) -> bytes:
    mixed = int.from_bytes(message, "big") ^ int.from_bytes(pad, "big")
    return mixed.to_bytes(len(message), "big")


def _text(name: str, end: bytes, nonces: tuple[bytes, bytes]) -> bytes:
    parts = (_DOMAIN, end, name.encode(), *nonces)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
