"""What the owner of a name says of its weights, and when: readers check it without believing the
coordinator.

An owner has one *owner key*, and a key pair for each name, whose public half is the name's
commitment. The owner key signs (name, commitment) once: the *endorsement*. It has no public key in
it, so that only who knows the owner key can tell that two names have one owner. The name's key pair
signs each *vouch*: these weights with these files are what a variant of the name stands for, since
then. A vouch is of a *family*, which is a revision and its updates: the coordinator numbers those.
Pure: nothing here knows a secret or the time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

from mx.core.revisions import MAIN, is_main, update_number
from mx.core.types import ManifestRef, ModelKey

_HEAD = struct.Struct(">Q32s32s64s64s")
#: Sizes of a vouch: without files, and with them.
SIZES = (_HEAD.size, _HEAD.size + 32)
#: The most vouches in an answer; and what is later than every date: it is in the year 9892.
MOST, END_US = 16, 250_000_000_000_000_000
_DOMAIN = b"mx owner of a name, version 1"
#: Verifies (public key, signature, text), as `mx.publickey.is_signed`.
Verify = Callable[[bytes, bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class Vouch:
    """One vouch. `issued_us` is in microseconds since 1970, `packaging` b"" for no files."""

    issued_us: int
    commitment: bytes
    identity: bytes
    packaging: bytes
    endorsement: bytes
    signature: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes that `decode` reads. Of two vouches the newer one's are greater."""
        head = (self.issued_us, self.commitment, self.identity, self.endorsement, self.signature)
        return _HEAD.pack(*head) + self.packaging

    def text(self, key: ModelKey) -> bytes:
        """Return what the name's key pair signs."""
        return _text(
            b"vouch", key.name.encode(), family(key.revision).encode(), key.variant.encode(),
            replace(self, signature=b"").encode(),
        )  # fmt: skip

    def covers(self, ref: ManifestRef) -> bool:
        """Return True if it is of these weights with these files."""
        return (self.identity, self.packaging) == (ref.identity, ref.packaging)

    def is_by(self, owner: bytes, name: str, verify: Verify) -> bool:
        """Return True if a key is the name's commitment, or the owner key that endorses it. The
        signature must have been verified."""
        endorsed = endorsement_text(name, self.commitment)
        return owner == self.commitment or verify(owner, self.endorsement, endorsed)


def family(revision: str) -> str:
    """Return the revision that this one is called an update of, or itself."""
    root = revision.rpartition(".")[0]
    updates = is_main(revision) if root == MAIN else bool(root and update_number(revision, root))
    return root if updates else revision


def endorsement_text(name: str, commitment: bytes) -> bytes:
    """Return what the owner key signs."""
    return _text(b"endorsement", name.encode(), commitment)


def _text(*parts: bytes) -> bytes:
    """Return one text from which the parts can be told apart."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in (_DOMAIN, *parts))


def decode(data: bytes, key: ModelKey, verify: Verify) -> Vouch | None:
    """Return the vouch that is in untrusted bytes, if its commitment has signed it for this name
    and variant, in the revision's family; else None."""
    if len(data) not in SIZES or int.from_bytes(data[:8], "big") >= END_US:
        return None
    issued_us, commitment, identity, endorsement, signature = _HEAD.unpack_from(data)
    found = Vouch(issued_us, commitment, identity, data[_HEAD.size :], endorsement, signature)
    return found if verify(commitment, signature, found.text(key)) else None


def preferred(kept: bytes, other: bytes, owner: bytes, ref: ManifestRef) -> bytes:
    """Return which of two vouches, each verified or b"", is kept with what is bound; b"" for none.

    It is the owner's: one that covers the bound files before others, and of those the newest. It
    does not matter who brings it.
    """

    def order(data: bytes) -> tuple[bool, bool, bytes]:
        return data[8:40] == owner, data[_HEAD.size :] == ref.packaging, data

    found = max(kept, other, key=order)
    return found if found[8:40] == owner else b""
