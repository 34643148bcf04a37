"""What the receiving side of a swarm (`mx.core.swarm.receiver`) wants done."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """Ask `peer` for `chunk`."""

    peer: int
    chunk: int


class Cancel(NamedTuple):
    """Give up the ask or the read of `chunk` from `peer`: another brings it."""

    peer: int
    chunk: int


class Decline(NamedTuple):
    """Tell the origin that its offer is not taken: the chunk is here, or asked of another."""

    peer: int
    chunk: int


class NotInterested(NamedTuple):
    """Tell `peer`, which said that it has room, that nothing is wanted of it now."""

    peer: int


class Interested(NamedTuple):
    """Tell `peer`, which was busy, to say when it has room."""

    peer: int


class ReadFreely(NamedTuple):
    """Read `chunk` from `peer`, a whole source, without asking."""

    peer: int
    chunk: int


Command = Request | Cancel | Decline | NotInterested | Interested | ReadFreely
