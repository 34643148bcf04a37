"""What the transfer machine asks of its caller. Not frozen, since a frozen one takes three times as
long to make, and each read makes two."""

from __future__ import annotations

from dataclasses import dataclass

from mx.core.striping import Part
from mx.errors import MxError


@dataclass(slots=True)
class Assign:
    """Read these parts through this connection."""

    connection: int
    parts: tuple[Part, ...]


@dataclass(slots=True)
class CopyOut:
    """This part, which was read aside, is right: copy what is wanted of it to its place, and report
    that by `TransferMachine.copied_out`."""

    part: Part


@dataclass(slots=True)
class HandOut:
    """This part is right: give other ranks on this host what they want of it, and report that by
    `TransferMachine.handed_out`."""

    part: Part


@dataclass(slots=True)
class LayerReady:
    """Every chunk of the layer is verified and in its place; `shortcut`: some blocks by xxh3_128
    only, where the kernel vouches that this user's own process wrote them; `given`: some by another
    rank on this host, which handed them over."""

    layer: int
    shortcut: bool = False
    given: bool = False


@dataclass(slots=True)
class Ask:
    """Ask the source of this connection whether the chunk, of which it sent some wrong, is right in
    its memory, and report its answer by `TransferMachine.answered`."""

    connection: int
    chunk: int


@dataclass(slots=True)
class DropConnection:
    """Close this connection: its source sent wrong bytes too often, or it is far too slow."""

    connection: int
    reason: MxError


@dataclass(slots=True)
class Fail:
    """Nothing is left that could finish the pull. `causes` are the connections' last errors."""

    causes: tuple[MxError, ...]


Command = Ask | Assign | CopyOut | HandOut | LayerReady | DropConnection | Fail
