"""The versions that both processes state in the first frame of every call. Pure.

Wire and layout are ranges, and two processes understand each other where both ranges overlap; the
digest version is exact. A peer that sends none is of version 1, before which there was nothing.
What a peer sends is read strictly, but a version that this mx does not know is still read as one:
the refusal names it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mx.core import layout_rules
from mx.errors import PeerProtocolError

#: Calls and their messages, tickets, and what is said before data moves: the newest that this mx
#: speaks, and the oldest that it understands and that understands it.
WIRE_VERSION = 7
WIRE_MIN_VERSION = 7
#: What is hashed, by what, and how digests make an identity.
DIGEST_VERSION = 2

#: What a refusal advises.
HINT = "run one release of mx on both sides, or two that follow each other"

#: The longest text that is read.
MAX_TEXT_CHARS = 128
MAX_VERSION = 65_535
_NAMES = ("wire", "layout", "digest")
_TEXT = re.compile(r"[a-z]{1,16}=[1-9][0-9]{0,4}(?:,[a-z]{1,16}=[1-9][0-9]{0,4}){2,9}")
#: What is shown of a text that can't be read.
_SHOWN_CHARS = 40
#: What a peer speaks that sends no versions, for messages.
SILENT = "wire 1 (an older mx, which sends no versions)"


@dataclass(frozen=True, slots=True)
class VersionRange:
    """The versions from `low` to `high`."""

    low: int
    high: int

    def __contains__(self, version: int) -> bool:
        return self.low <= version <= self.high

    def overlaps(self, other: VersionRange) -> bool:
        """Return True if a version is in both."""
        return self.low <= other.high and other.low <= self.high

    def __str__(self) -> str:
        return f"{self.high}" if self.low == self.high else f"{self.low} to {self.high}"


class Versions(NamedTuple):
    """What a process speaks. `others` are versions that only a newer mx has: name and number."""

    wire: VersionRange
    layout: VersionRange
    digest: int
    others: tuple[tuple[str, int], ...] = ()

    def encode(self) -> str:
        """Return the text that `decode` reads, such as "wire=8,layout=3,digest=2,wiremin=7": a
        range's lower end is named where it is not its upper one."""
        pairs = [("wire", self.wire.high), ("layout", self.layout.high), ("digest", self.digest)]
        for name, span in (("wire", self.wire), ("layout", self.layout)):
            if span.low != span.high:
                pairs.append((f"{name}min", span.low))
        return ",".join(f"{name}={number}" for name, number in (*pairs, *self.others))

    def understands(self, other: Versions) -> bool:
        """Return True if two processes that speak these understand each other."""
        return (
            self.wire.overlaps(other.wire)
            and self.layout.overlaps(other.layout)
            and self.digest == other.digest
        )

    def __str__(self) -> str:
        """Return the text for messages, such as "wire 7 to 8, layout 2, digest 2"."""
        own = (("wire", self.wire), ("layout", self.layout), ("digest", self.digest))
        return ", ".join(f"{name} {number}" for name, number in (*own, *self.others))


def own() -> Versions:
    """Return what this process speaks."""
    layout = VersionRange(layout_rules.oldest(), layout_rules.newest())
    return Versions(VersionRange(WIRE_MIN_VERSION, WIRE_VERSION), layout, DIGEST_VERSION)


@functools.lru_cache(64)  # a process meets few different ones
def decode(text: str) -> Versions:
    """Return the versions that a peer has sent.

    Args:
        text: What `Versions.encode` returns, or anything else.

    Raises:
        PeerProtocolError: It is not such a text.
    """
    # The length first: the pattern is only tried on short texts.
    if len(text) <= MAX_TEXT_CHARS and _TEXT.fullmatch(text):
        pairs = [(name, int(number)) for name, number in (e.split("=") for e in text.split(","))]
        found = dict(pairs)
        is_valid = len(found) == len(pairs) and max(found.values()) <= MAX_VERSION
        if is_valid and tuple(found)[:3] == _NAMES:
            wire, layout, digest = (found.pop(name) for name in _NAMES)
            low_wire, low_layout = found.pop("wiremin", wire), found.pop("layoutmin", layout)
            spans = VersionRange(low_wire, wire), VersionRange(low_layout, layout)
            versions = Versions(*spans, digest, tuple(found.items()))
            if low_wire <= wire and low_layout <= layout and versions.encode() == text:
                return versions
    raise PeerProtocolError(f"versions that can't be read: {text[:_SHOWN_CHARS]!a}")


def read(sent: Sequence[str]) -> Versions | str:
    """Return the versions that a peer has sent; else what is to be said of them.

    Args:
        sent: The texts that came under the name of the versions: one, or none from an old peer.
    """
    if not sent:
        return SILENT
    if len(sent) > 1:
        return f"versions that can't be read: {len(sent)} texts"
    try:
        return decode(sent[0])
    except PeerProtocolError as error:
        return error.message


def mismatch(sent: Sequence[str]) -> str | None:
    """Compare what a peer has sent with what this process speaks.

    Args:
        sent: As for `read`.

    Returns:
        None if both understand each other; else what the peer speaks, for a message.
    """
    theirs = read(sent)
    if isinstance(theirs, str):
        return theirs
    return None if own().understands(theirs) else str(theirs)


VERSIONS_KEY = "mx-versions"


def headers() -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries what this process speaks."""
    return ((VERSIONS_KEY, own().encode()),)


def sent(metadata: Iterable[tuple[str, Any]] | None) -> list[str]:
    """Return the texts that came with a call or an answer under the name of the versions."""
    return [str(value) for key, value in metadata or () if key == VERSIONS_KEY]


def answered(initial: Iterable[tuple[str, Any]] | None, trailing: Any) -> list[str]:
    """Return the texts that came with an answer: ahead of it or, with one of a single message and
    with a refusal, in its end."""
    return sent(initial) or sent(trailing)
