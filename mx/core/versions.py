"""The versions that both processes state in the first frame of every call. Pure.

A peer that sends none is of version 1, before which there was nothing. What a peer sends is read
strictly, but a version that this mx does not know is still read as one: the refusal names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mx.errors import PeerProtocolError

#: Calls and their messages, tickets, and what is said before data moves.
WIRE_VERSION = 6
#: The order and the places of tensors, and how they are cut into chunks.
LAYOUT_VERSION = 2
#: What is hashed, by what, and how digests make an identity.
DIGEST_VERSION = 2

#: The longest text that is read.
MAX_TEXT_CHARS = 128
_MAX_NUMBER = 65_535
_NAMES = ("wire", "layout", "digest")
_TEXT = re.compile(r"[a-z]{1,16}=[1-9][0-9]{0,4}(?:,[a-z]{1,16}=[1-9][0-9]{0,4}){2,7}")
#: What is shown of a text that can't be read.
_SHOWN_CHARS = 40
#: What a peer speaks that sends no versions, for messages.
SILENT = "wire 1 (an older mx, which sends no versions)"


@dataclass(frozen=True, slots=True)
class Versions:
    """What a process speaks. `others` are versions that only a newer mx has: name and number."""

    wire: int
    layout: int
    digest: int
    others: tuple[tuple[str, int], ...] = ()

    def _pairs(self) -> tuple[tuple[str, int], ...]:
        own = zip(_NAMES, (self.wire, self.layout, self.digest), strict=True)
        return (*own, *self.others)

    def encode(self) -> str:
        """Return the text that `decode` reads, such as "wire=2,layout=2,digest=2"."""
        return ",".join(f"{name}={number}" for name, number in self._pairs())

    def __str__(self) -> str:
        """Return the text for messages, such as "wire 2, layout 2, digest 2"."""
        return ", ".join(f"{name} {number}" for name, number in self._pairs())


def own() -> Versions:
    """Return what this process speaks."""
    return Versions(WIRE_VERSION, LAYOUT_VERSION, DIGEST_VERSION)


def decode(text: str) -> Versions:
    """Return the versions that a peer has sent.

    Args:
        text: What `Versions.encode` returns, or anything else.

    Raises:
        PeerProtocolError: It is no such text.
    """
    # The length first: the pattern is only tried on short texts.
    if len(text) <= MAX_TEXT_CHARS and _TEXT.fullmatch(text):
        pairs = [(name, int(number)) for name, number in (e.split("=") for e in text.split(","))]
        names = [name for name, _ in pairs]
        (_, wire), (_, layout), (_, digest), *others = pairs
        is_valid = len(set(names)) == len(names) and max(n for _, n in pairs) <= _MAX_NUMBER
        if is_valid and tuple(names[:3]) == _NAMES:
            return Versions(wire, layout, digest, tuple(others))
    raise PeerProtocolError(f"versions that can't be read: {text[:_SHOWN_CHARS]!a}")


def mismatch(sent: Sequence[str]) -> str | None:
    """Compare what a peer has sent with what this process speaks.

    Args:
        sent: The texts that came under the name of the versions: one, or none from an old peer.

    Returns:
        None if the peer speaks the same; else what it speaks, for a message.
    """
    if not sent:
        return SILENT
    if len(sent) > 1:
        return f"versions that can't be read: {len(sent)} texts"
    try:
        theirs = decode(sent[0])
    except PeerProtocolError as error:
        return error.message
    return None if theirs == own() else str(theirs)
