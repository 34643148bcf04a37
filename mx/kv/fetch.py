"""One fetch of KV blocks: reads them layer by layer, and compares each part with its digest."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mx.errors import MxError
from mx.kv.index import KvEntry
from mx.kv.layout import KvMemory, digest_of
from mx.kv.names import ID_BYTES
from mx.kv.peer import KvGiver, KvLink
from mx.runtime import fork_error
from mx.transport import Piece, Read

#: About how many bytes are read as a unit: enough for a trip, and few enough that the connections
#: of a session share the layers.
_READ_BYTES = 4 << 20


@dataclass(eq=False)
class Taken:
    """A block that is read from one pool: `left` counts the layers that are still to come."""

    block: bytes
    slot: int
    peer: KvGiver
    link: KvLink
    entry: KvEntry
    left: int
    wrong: bool = False


class _KvPart(NamedTuple):
    """One layer of a block in a read, of which it is the part up to `end_nbytes`; `runs` are where
    it lands."""

    taken: Taken
    layer: int
    runs: Sequence[memoryview]
    end_nbytes: int


class _KvRead:
    """The sink of one read: parts, one after the other."""

    def __init__(self, fetch: KvFetch, parts: Sequence[_KvPart]) -> None:
        self._fetch, self._parts = fetch, parts
        self._done = 0

    def landed(self, nbytes: int) -> None:
        while self._done < len(self._parts) and self._parts[self._done].end_nbytes <= nbytes:
            taken, layer, runs, _ = self._parts[self._done]
            wanted = taken.entry.digests[layer * ID_BYTES : (layer + 1) * ID_BYTES]
            right = digest_of(runs) == wanted
            self._done += 1
            self._fetch.ended(taken, layer, right=right, wrong=not right)

    def done(self) -> None:
        self.landed(self._parts[-1].end_nbytes)

    def failed(self, error: MxError) -> None:
        self._fetch.errors.append(str(error))
        for part in self._parts[self._done :]:
            self._fetch.ended(part.taken, part.layer, right=False)
        self._done = len(self._parts)


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
        self._process = os.getpid()

    def begin(self, memory: KvMemory) -> None:
        """Begin to read into this memory. Called once."""
        by_link: dict[KvLink, list[Taken]] = {}
        for each in self._taken:
            by_link.setdefault(each.link, []).append(each)
        for link, taken in by_link.items():
            assert link.session is not None  # this reader has memory
            for read in self._reads(memory, link, taken):
                try:
                    link.session.read([read])
                except MxError as error:  # it is closed: no sink is called
                    read.sink.failed(error)

    def _reads(self, memory: KvMemory, link: KvLink, taken: Sequence[Taken]) -> Iterator[Read]:
        """Yield reads of all parts, those of the first layer first."""
        pieces: list[Piece] = []
        parts: list[_KvPart] = []
        nbytes = 0
        for layer, (theirs, own) in enumerate(zip(link.rows, link.own_rows, strict=True)):
            copied, view = link.copies[layer], memory.views[own.region]
            for each in taken:
                there, here = each.entry.slot * theirs.stride, each.slot * own.stride
                runs = [view[here + to : here + to + size] for _, to, size in copied]
                pieces += (
                    Piece(theirs.region, there + begin, run)
                    for (begin, _, _), run in zip(copied, runs, strict=True)
                )
                nbytes += theirs.nbytes
                parts.append(_KvPart(each, layer, runs, nbytes))
                if nbytes >= _READ_BYTES:
                    yield Read(f"KV layer {layer}", pieces, _KvRead(self, parts))
                    pieces, parts, nbytes = [], [], 0
        if parts:
            yield Read("KV blocks", pieces, _KvRead(self, parts))

    def ended(self, taken: Taken, layer: int, *, right: bool, wrong: bool = False) -> None:
        """Note that a part has ended; on a transport's thread.

        Args:
            taken: Its block.
            layer: Its layer.
            right: It is there, and verified.
            wrong: It came, and its bytes are not those of its digest.
        """
        with self._changed:
            taken.left -= 1
            taken.wrong |= wrong
            self._left[layer] -= 1
            if not right:
                self.failed.add(taken.block)
            last, whole = not taken.left, not self._left[layer]
        if last:
            taken.peer.end(taken.link, taken.block, taken.entry, wrong=taken.wrong)
        if whole:
            with self._changed:
                self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until nothing of one layer is on its way. Return False if the time passed first.

        Raises:
            ForkError: This process is a forked child, where nothing comes.
        """
        if os.getpid() != self._process:
            raise fork_error()
        with self._changed:
            return self._changed.wait_for(lambda: not self._left[layer], timeout_s)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is on its way. Return False if the time passed first."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for layer in range(len(self._left)):
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not self.wait_layer(layer, left_s):
                return False
        return True

    @property
    def is_done(self) -> bool:
        """True if nothing is on its way."""
        return self.wait(0.0)
