"""Reads the whole model from its parts: each read is divided among the sessions to them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mx.core.types import Layout
from mx.errors import ClosedError, MxError, NotAllowedError, PeerProtocolError
from mx.fetching.reads import Connection
from mx.trainers.pieces import PartSpan
from mx.transport import AdoptsPlaces, Piece, Read, ScatteredView, Sink, View
from mx.views import Span

#: The most reads that are outstanding at a time.
_MOST_DEPTH = 64


class PartsMap:
    """Where the bytes of a model's arena are in the arenas of its parts. Immutable."""

    def __init__(
        self, layout: Layout, spans: Mapping[str, Sequence[PartSpan]], parts: Sequence[Layout]
    ) -> None:
        """
        Args:
            layout: The whole model's.
            spans: Where each of its tensors is, as `spans_of` returns it.
            parts: The layouts of the parts.
        """
        places = [
            [each.layers[tensor.layer].arena_offset + tensor.offset for tensor in each.tensors]
            for each in parts
        ]
        self._begins: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # (end, part, place there)
        for tensor in layout.tensors:
            base = layout.layers[tensor.layer].arena_offset + tensor.offset
            for begin, end, part, index, offset in spans[tensor.name]:
                self._begins.append(base + begin)
                self._places.append((base + end, part, places[part][index] + offset))
        self.nbytes = layout.arena_nbytes

    def split(self, piece: Piece) -> list[tuple[int, Piece]]:
        """Return the parts that a piece is in, each with its own piece of that, in order.

        Raises:
            PeerProtocolError: No part has some of it.
        """
        found: list[tuple[int, Piece]] = []
        at, end = piece.region_offset, piece.region_offset + len(piece.view)
        index = bisect_right(self._begins, at) - 1
        done = 0
        while at < end:
            if not 0 <= index < len(self._begins) or not (
                piece.region == 0 and self._begins[index] <= at < self._places[index][0]
            ):
                raise PeerProtocolError(f"no part has the model's bytes at {at}")
            until, part, place = self._places[index]
            take = min(until, end) - at
            there = place + at - self._begins[index]
            found.append((part, Piece(0, there, piece.view[done : done + take])))
            at, done, index = at + take, done + take, index + 1
        return found


class _Stretch(NamedTuple):
    """A run of a read's bytes that comes from one part: it ends at `end` of that part's bytes."""

    part: int
    nbytes: int
    end: int


class _DividedRead:
    """A read whose bytes come from several parts. Its sink is called by one thread at a time."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.stretches: list[_Stretch] = []
        self.pieces: dict[int, list[Piece]] = {}
        self._sizes: dict[int, int] = {}
        self._lock = threading.Lock()
        self._landed: dict[int, int] = {}
        self._at = self._before = self._told = 0  # the stretch that comes, and the bytes before it
        self._left = 0
        self._error: MxError | None = None

    def add(self, part: int, piece: Piece) -> None:
        self.pieces.setdefault(part, []).append(piece)
        size = self._sizes[part] = self._sizes.get(part, 0) + len(piece.view)
        self.stretches.append(_Stretch(part, len(piece.view), size))

    def begin(self) -> None:
        self._left = len(self.pieces)
        self._landed = dict.fromkeys(self.pieces, 0)

    def landed(self, part: int, nbytes: int) -> None:
        with self._lock:
            self._landed[part] = nbytes
            while self._at < len(self.stretches):
                stretch = self.stretches[self._at]
                if self._landed[stretch.part] < stretch.end:
                    break
                self._before += stretch.nbytes
                self._at += 1
            whole = self._before
            if self._at < len(self.stretches):
                stretch = self.stretches[self._at]
                whole += max(0, self._landed[stretch.part] - stretch.end + stretch.nbytes)
            if whole > self._told and self._error is None:
                self._told = whole
                self.sink.landed(whole)

    def ended(self, part: int, error: MxError | None) -> None:
        if error is None:
            self.landed(part, self._sizes[part])
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
            if self._error is None:
                self.sink.done()
            else:
                self.sink.failed(self._error)


class _RankSink:
    """The sink of what is read from one part."""

    def __init__(self, read: _DividedRead, part: int, check: Callable[[], MxError | None]) -> None:
        self._read, self._part, self._check = read, part, check

    def landed(self, nbytes: int) -> None:
        self._read.landed(self._part, nbytes)

    def done(self) -> None:
        # What was read after a lease has ended may be of any step.
        self._read.ended(self._part, self._check())

    def failed(self, error: MxError) -> None:
        self._read.ended(self._part, error)


class PartsSession:
    """A session that reads from all parts; see `mx.transport.Session`."""

    def __init__(
        self, where: PartsMap, connections: Sequence[Connection], close: Callable[[], Join]
    ) -> None:
        """
        Args:
            where: Where the model's bytes are.
            connections: Those to the parts, in their order.
            close: Begins to close them; returns what waits for that.
        """
        self._map, self._connections, self._close = where, connections, close
        # Reads that follow each other are mostly of one part: more of them keep all parts busy.
        self.depth = min(_MOST_DEPTH, sum(each.session.depth for each in connections))
        self._joins: Join | None = None
        self._lock = threading.Lock()

    def adopt(self, arena: Span) -> None:
        for each in self._connections:
            each.session.adopt(arena)

    def adopt_places(self, arena: ScatteredView) -> None:
        for each in self._connections:
            if isinstance(each.session, AdoptsPlaces):
                each.session.adopt_places(arena)

    def read(self, reads: Sequence[Read]) -> None:
        with self._lock:
            if self._joins is not None:
                raise ClosedError("the session is closed")
        by_part: dict[int, list[Read]] = {}
        divided: list[_DividedRead] = []
        for read in reads:
            whole = _DividedRead(read.sink)
            try:
                for piece in read.pieces:
                    for part, each in self._map.split(piece):
                        whole.add(part, each)
            except MxError as error:
                read.sink.failed(error)
                continue
            if not whole.pieces:
                read.sink.done()
                continue
            whole.begin()
            divided.append(whole)
            for part, pieces in whole.pieces.items():
                sink = _RankSink(whole, part, self._connections[part].lease.check)
                by_part.setdefault(part, []).append(Read(read.tag, pieces, sink))
        for part, own in by_part.items():
            try:
                self._connections[part].session.read(own)
            except ClosedError as error:  # no sink of it is called
                for read in own:
                    read.sink.failed(error)

    def attach(self, region: int) -> View:
        """Raise NotAllowedError: the model is in several processes."""
        raise NotAllowedError("the parts of a trainer's model are read, and not attached to")

    def close(self) -> None:
        with self._lock:
            if self._joins is None:
                for each in self._connections:
                    each.session.close()
                self._joins = self._close()

    def join(self, timeout_s: float | None = None) -> bool:
        return self._joins is not None and self._joins(timeout_s)


#: Waits so many seconds until all is closed, and returns whether it is.
Join = Callable[[float | None], bool]
