"""One fetch of KV blocks: reads them layer by layer, and compares each part with its digest."""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mx.errors import MxError
from mx.kv.index import KvEntry
from mx.kv.layout import KvMemory
from mx.kv.names import ID_BYTES
from mx.kv.peer import KvGiver, KvLink
from mx.runtime import fork_error
from mx.transport import Piece, Read

#: About how many bytes are read as a unit: enough for a trip, and few enough that the connections
#: of a session share the layers.
_READ_BYTES = 4 << 20
#: Less where that is all: while some is hashed, the rest comes.
_LEAST_READ_BYTES = 1 << 20
#: The same on a GPU, which hashes the parts of a read at once.
_GPU_READ_BYTES = 64 << 20


@dataclass(eq=False)
class Taken:
    """A block that is read from one pool."""

    block: bytes
    slot: int
    peer: KvGiver
    link: KvLink
    entry: KvEntry
    wrong: bool = False


class _KvRead:
    """The sink of one read: parts, one after the other. All lists are by part."""

    def __init__(self, fetch: KvFetch, memory: KvMemory, link: KvLink) -> None:
        self._fetch, self._memory, self._link = fetch, memory, link
        self._done = 0
        self.pieces: list[Piece] = []
        self.taken: list[Taken] = []
        self.layers: list[int] = []
        self.runs: list[Sequence[Any]] = []  # where each lands
        self.ends: list[int] = []  # the bytes of the read up to its end
        self.digests: list[bytes] = []

    def add(self, taken: Taken, layer: int, runs: Sequence[Any], nbytes: int) -> int:
        """Add one layer of a block; return the bytes of the read."""
        self.taken.append(taken)
        self.layers.append(layer)
        self.runs.append(runs)
        self.digests.append(taken.entry.digests[layer * ID_BYTES : (layer + 1) * ID_BYTES])
        self.ends.append(nbytes + (self.ends[-1] if self.ends else 0))
        return self.ends[-1]

    def landed(self, nbytes: int) -> None:
        begin = self._done
        end = bisect_right(self.ends, nbytes, begin)
        if begin == end or (self._memory.gpu is not None and end < len(self.ends)):
            return  # a GPU hashes all at once
        try:
            digests = self._memory.digests_of(self.runs[begin:end])
        except MxError as error:
            return self.failed(error)
        self._done = end
        expected, wrong = self.digests[begin:end], []
        if digests != expected:
            pairs = enumerate(zip(digests, expected, strict=True), begin)
            wrong = [self.taken[at] for at, (found, right) in pairs if found != right]
        for taken in wrong:
            taken.wrong = True
        self._fetch.ended(self._link, self.layers[begin:end], wrong)

    def done(self) -> None:
        self.landed(self.ends[-1])

    def failed(self, error: MxError) -> None:
        self._fetch.errors.append(str(error))
        begin, self._done = self._done, len(self.ends)
        if begin < len(self.ends):  # else all of it was right before this
            self._fetch.ended(self._link, self.layers[begin:], self.taken[begin:])


class KvFetch:
    """Blocks on their way. Their slots must not be used until `wait` has returned True.

    Attributes:
        failed: The blocks of which a part did not come, or was wrong: the engine computes them.
        errors: Why, for people.
    """

    def __init__(self, taken: Sequence[Taken], missing: Sequence[bytes], layers: int) -> None:
        """
        Args:
            taken: What is read, from all pools.
            missing: Blocks that no pool has.
            layers: How many layers a block has.
        """
        self.failed = set(missing)
        self.errors: list[str] = []
        self._taken = taken
        self._changed = threading.Condition()
        self._left = [len(taken)] * layers  # parts, by layer
        self._by_link: dict[KvLink, list[Taken]] = {}
        for each in taken:
            self._by_link.setdefault(each.link, []).append(each)
        self._links_left = {link: layers * len(own) for link, own in self._by_link.items()}  # parts
        self._layers_left = layers if taken else 0
        self._process = os.getpid()

    def begin(self, memory: KvMemory) -> None:
        """Begin to read into this memory. Called once."""
        for link, taken in self._by_link.items():
            assert link.session is not None  # this reader has memory
            for layer, sink in self._reads(memory, link, taken):
                try:
                    link.session.read([Read(f"KV layer {layer}", sink.pieces, sink)])
                except MxError as error:  # it is closed: no sink is called
                    sink.failed(error)

    def _reads(
        self, memory: KvMemory, link: KvLink, taken: Sequence[Taken]
    ) -> Iterator[tuple[int, _KvRead]]:
        """Yield reads of all parts, those of the first layer first."""
        size = _GPU_READ_BYTES
        if memory.gpu is None:
            whole = len(taken) * sum(each.nbytes for each in link.rows)
            size = min(_READ_BYTES, max(_LEAST_READ_BYTES, whole // 4))
        read = _KvRead(self, memory, link)
        for layer, (theirs, own) in enumerate(zip(link.rows, link.own_rows, strict=True)):
            copied, view, nbytes = link.copies[layer], memory.views[own.region], theirs.nbytes
            # Slots that follow each other are read as one piece where they can be.
            joins = len(copied) > 1 or theirs.stride == own.stride == nbytes
            spans: list[list[int]] = []  # (offset there, offset here, bytes)
            for each in taken:
                there, here = each.entry.slot * theirs.stride, each.slot * own.stride
                runs = [view[here + to : here + to + run] for _, to, run in copied]
                if joins:
                    for begin, to, run_nbytes in copied:
                        _extend(spans, there + begin, here + to, run_nbytes)
                else:
                    read.pieces.append(Piece(theirs.region, there + copied[0][0], runs[0]))
                if read.add(each, layer, runs, nbytes) >= size:
                    read.pieces += _pieces(theirs.region, view, spans)
                    yield layer, read
                    spans, read = [], _KvRead(self, memory, link)
            read.pieces += _pieces(theirs.region, view, spans)
        if read.ends:
            yield layer, read

    def ended(self, link: KvLink, layers: Sequence[int], failed: Sequence[Taken]) -> None:
        """Note that parts have ended; on a transport's thread.

        Args:
            link: Where they were read from.
            layers: The layer of each, in order.
            failed: The blocks of those that did not come, or are wrong.
        """
        with self._changed:
            for each in failed:
                self.failed.add(each.block)
            self._links_left[link] -= len(layers)
            last = not self._links_left[link]
        # Before who waits goes on; and for a pool that another, slower one holds up, too.
        if last:
            for taken in self._by_link[link]:
                taken.peer.end(taken.link, taken.block, taken.entry, wrong=taken.wrong)
        with self._changed:
            before = self._layers_left
            for layer in range(layers[0], layers[-1] + 1):
                self._left[layer] -= layers.count(layer)
                self._layers_left -= not self._left[layer]
            if before != self._layers_left:
                self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until nothing of one layer is on its way. Return False if the time passed first.

        Raises:
            ForkError: This process is a forked child, where nothing comes.
        """
        self._require_own_process()
        with self._changed:
            return self._changed.wait_for(lambda: not self._left[layer], timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is on its way. Return False if the time passed first. Raises as
        `wait_layer`."""
        self._require_own_process()
        with self._changed:
            return self._changed.wait_for(lambda: not self._layers_left, timeout_s)

    def came(self) -> dict[bytes, KvEntry]:
        """Return the blocks that are there, each with its slot and digests; none before the end."""
        return {
            each.block: KvEntry(each.slot, each.entry.digests)
            for each in (() if self._layers_left else self._taken)
            if each.block not in self.failed
        }

    @property
    def is_done(self) -> bool:
        """True if nothing is on its way."""
        return self.wait(0.0)

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise fork_error()


def _extend(spans: list[list[int]], there: int, here: int, nbytes: int) -> None:
    """Add a span, or make the last one longer where it ends there at both ends: slots that follow
    each other are read as one."""
    last = spans[-1] if spans else [0, 0, -1]
    if (last[0] + last[2], last[1] + last[2]) == (there, here):
        last[2] += nbytes
    else:
        spans.append([there, here, nbytes])


def _pieces(region: int, view: Any, spans: Sequence[Sequence[int]]) -> list[Piece]:
    return [Piece(region, there, view[here : here + nbytes]) for there, here, nbytes in spans]
