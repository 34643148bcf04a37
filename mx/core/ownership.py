"""What holders of a name key sign, and the receipts by which a coordinator knows a binding again.

A name key has a key pair for each name (`mx.namekey`). The public half is the name's *commitment*.
A source signs a *statement*, that the holders of the key vouch for these weights, which readers can
check for themselves; and with each registration a *proof* that it holds the key, which is good for
one registration. It does not say at which coordinator, since a coordinator has many addresses: one
that a source registers with can fetch the nonce from another one and pass the registration on to
that. It can pass on only what was signed: these weights, at the source's own endpoint. Pure:
nothing here knows a secret.
"""

from __future__ import annotations

import enum
import json
from typing import Any, NamedTuple

from mx.core.revisions import may_be_update, update_number
from mx.core.types import ModelKey
from mx.errors import ConfigError

COMMITMENT_BYTES = 32
SIGNATURE_BYTES = 64
MAC_BYTES = 32
#: The longest certificate of a lender key (`mx.lenderkey`).
MAX_CERTIFICATE_BYTES = 1024
#: The longest receipt: names have 256 characters at most.
MAX_RECEIPT_BYTES = 8192

#: Less than every certain rank, and more than every tentative one.
TENTATIVE = 1e-3

_DOMAIN = b"mx name key, version 1"


class Purpose(enum.Enum):
    """What a signature is for."""

    STATEMENT = b"statement"
    UPDATE_STATEMENT = b"statement of an update"
    REGISTER = b"register"
    UPDATE = b"update"
    LENDER = b"lender key"


class Receipt(NamedTuple):
    """What a coordinator bound: a later life of it believes this if the MAC is its own.

    `base` is the revision that `key.revision` is an update of, "" for none. `newest` is the number
    of the variant's newest update when the receipt was issued, and `completed` for a rank of
    several that of the newest revision in which all ranks were there, -1 for none. `issued_s`
    orders the receipts of earlier lives. `this_life` is True for one that the coordinator has given
    since it started; it is not encoded. With `lent` a lender key has bound it. `newest_s` is when
    the newest update was published, in seconds since 1970; 0.0: before the receipt was issued.

    `rank` orders receipts of different owners: 0.0 for `issued_s`. While a coordinator that has
    lost its state has yet to hear of earlier owners, who comes first may be a stranger. What it
    gives him then is *tentative*: its rank is below those of all others, and of two such the
    earlier has the higher one.
    """

    key: ModelKey
    identity: bytes
    commitment: bytes
    base: str = ""
    newest: int = 0
    issued_s: float = 0.0
    completed: int = -1
    this_life: bool = False
    lent: bool = False
    rank: float = 0.0
    newest_s: float = 0.0
    tentative: bool = False  # not encoded

    def issued(self, now_s: float) -> Receipt:
        """Return it as given at a time since 1970."""
        rank = (self.rank or 1.0 / now_s) if self.tentative else 0.0
        return self._replace(issued_s=now_s, rank=rank)

    @property
    def weight(self) -> float:
        """By which it counts among receipts of different owners."""
        return self.rank or self.issued_s

    def is_of_newest(self, key: ModelKey, commitment: bytes) -> bool:
        """Return True if it was given for this key to its owner, and that was the newest update."""
        root = self.base or key.revision
        newest = update_number(key.revision, root) == self.newest
        return newest and (self.key, self.commitment) == (key, commitment)

    def encode(self) -> bytes:
        """Return the bytes that the coordinator's MAC covers, and that `decode` reads."""
        key = self.key
        weights = [key.name, key.revision, key.variant, self.identity.hex(), self.commitment.hex()]
        fields: list[Any] = [*weights, self.base, self.newest, self.issued_s]
        # A release before these fields reads the receipts of other variants.
        more = [self.completed, int(self.lent), self.rank, self.newest_s]
        while more and more[-1] in (-1, 0):
            more.pop()
        fields += more
        # With escapes, a character takes up to twelve bytes.
        return json.dumps(fields, ensure_ascii=False).encode()

    @classmethod
    def decode(cls, data: bytes) -> Receipt:
        """Return the receipt that `encode` wrote. Its MAC must have been checked.

        Raises:
            ConfigError: It is written in another way.
        """
        try:
            found: Any = json.loads(data)
            name, revision, variant, identity, commitment, base, newest, issued_s, *more = found
            completed, lent, rank, newest_s = [*more, *(-1, 0, 0.0, 0.0)[len(more) :]][:4]
            return cls(
                ModelKey(str(name), str(revision), str(variant)),
                bytes.fromhex(identity),
                bytes.fromhex(commitment),
                str(base),
                int(newest),
                float(issued_s),
                int(completed),
                lent=bool(lent),
                rank=float(rank),
                newest_s=float(newest_s),
            )
        except (ValueError, TypeError, RecursionError):
            raise ConfigError("a receipt of another version") from None


def statement(key: ModelKey, identity: bytes, *, replaces: str = "") -> bytes:
    """Return what a holder of the name key signs to vouch for a variant's weights.

    It says whether they are an update's: a variant's name may say what its first weights are made
    of. It does not say which, since the coordinator numbers updates.

    Args:
        key: Of the weights.
        identity: Theirs.
        replaces: The revision that they update, if they are registered so.
    """
    updated = bool(replaces) or may_be_update(key.revision)
    purpose = Purpose.UPDATE_STATEMENT if updated else Purpose.STATEMENT
    return _text(purpose, key.name.encode(), key.variant.encode(), identity)


def proof(
    purpose: Purpose,
    key: ModelKey,
    identity: bytes,
    source_id: str,
    endpoint: str,
    secret_digest: bytes,
    nonce: bytes,
) -> bytes:
    """Return what a source signs to register as a holder of the name key.

    Args:
        purpose: REGISTER or UPDATE.
        key: The name, the variant, and the revision: for an update the one that it replaces.
        identity: Of the weights.
        source_id: The source.
        endpoint: Where it serves the weights.
        secret_digest: The digest of the source's own secret, which no other source knows.
        nonce: The coordinator's.
    """
    texts = (key.name, key.revision, key.variant, source_id, endpoint)
    return _text(purpose, *(text.encode() for text in texts), identity, secret_digest, nonce)


def certificate_text(name: str, said: bytes) -> bytes:
    """Return what the owner of a name signs to certify a lender key for it."""
    return _text(Purpose.LENDER, name.encode(), said)


def _text(purpose: Purpose, *parts: bytes) -> bytes:
    """Return one text from which the parts can be told apart: each with its length before it."""
    parts = (_DOMAIN, purpose.value, *parts)
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)
