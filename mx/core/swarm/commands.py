"""What the receiving side of a swarm (`mx.core.swarm.receiver`) wants done."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """Request `chunk` from `peer`."""

    peer: int
    chunk: int


class Cancel(NamedTuple):
    """Cancel the request for `chunk` at `peer`, or the read: another peer serves it."""

    peer: int
    chunk: int


class Decline(NamedTuple):
    """Decline the origin's suggestion: the chunk is held here, or requested from another peer."""

    peer: int
    chunk: int


class NotInterested(NamedTuple):
    """Answer `peer`, which announced a free slot, that no chunk is wanted from it now."""

    peer: int


class Interested(NamedTuple):
    """Have `peer`, which rejected a request, announce when a slot is free."""

    peer: int


class ReadFreely(NamedTuple):
    """Read `chunk` from `peer`, a whole source, without a request."""

    peer: int
    chunk: int


Command = Request | Cancel | Decline | NotInterested | Interested | ReadFreely
