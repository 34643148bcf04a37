"""Passes blocks between ranks on one host: those that one has read and verified, and others want.

Each rank has a *ring*: slots of shared memory, which the others map. It copies blocks into a slot
and says so; the others copy their part from there and say that they have; then the slot is free
again. A rank that is gone, or silent for long, is left: its share is read here, and its slots are
free. It may still copy from one of these then, so each slot counts its uses, and who copies looks
at the count again afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from mx import forks
from mx.core.grid import ChunkGrid
from mx.core.local_ranks import Shares
from mx.core.striping import Part
from mx.core.wanted import ASIDE_BYTES, WantedBlocks
from mx.errors import PeerProtocolError
from mx.fetching.ring import Ring

log = logging.getLogger(__name__)

#: How often a rank says that it is alive.
BEAT_S = 0.5
#: A rank to which no byte comes for so many times as long as it may be silent is left.
_PATIENCE = 4
#: How many messages of one rank are acted on before the others have their turn.
_TURN = 4

#: What, then of blocks that are handed over: chunk, first and last block, slot, use of the slot; of
#: a rank that is alive only the last number: how many bytes have come to it.
_MESSAGE = struct.Struct("<B3xIIIIQ")
_ALIVE, _HANDED, _TAKEN = range(3)


class Fellow:
    """Another rank: the socket to it, and its ring."""

    def __init__(self, rank: int, sock: socket.socket, ring: Ring) -> None:
        self.rank = rank
        self.sock = sock
        self.ring = ring
        self.heard_s = 0.0
        self.lost = False  # it has missed a message
        self.landed_nbytes = 0  # as it says
        self.moved_s = 0.0  # when that changed
        sock.setblocking(False)
        forks.own(sock)

    def close(self) -> None:
        self.sock.close()
        self.ring.close()


class Pulling(Protocol):
    """The pull whose blocks are exchanged: `mx.fetching.transfer.Transfer`."""

    def write_given(self, part: Part, data: memoryview) -> None:
        """Scatter a part's wanted blocks to their destinations."""

    def given(self, rank: int, part: Part) -> None:
        """A part that this rank has read is in its place."""

    def landed_nbytes(self) -> int:
        """Return how many bytes have come."""

    def expects(self, rank: int) -> bool:
        """Return True if this rank has yet to hand over something."""

    def take_up(self, rank: int) -> bool:
        """Read what was expected from this rank. Returns True if anything was."""

    def raised(self, error: BaseException) -> None:
        """The thread of the exchange raised an unexpected exception."""


class Exchange:
    """One pull's; owns its fellows and a thread. `begin` starts it, `close` ends it."""

    def __init__(self, grid: ChunkGrid, ring: Ring, fellows: Sequence[Fellow]) -> None:
        """
        Args:
            grid: The chunks.
            ring: This rank's.
            fellows: The other ranks.
        """
        self._grid = grid
        self.ring = ring
        self.fellows = tuple(fellows)  # all that there were at first
        self._fellows = {each.rank: each for each in fellows}
        self._changed = threading.Condition()
        self._free = list(range(ring.slots))
        self._awaited: dict[int, set[int]] = {}  # slot -> the ranks that have yet to copy from it
        self._closed = False
        self._pipe = [*os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)]
        self._wake, self._woken = self._pipe
        self._thread: threading.Thread | None = None

    def shares(self, rank: int, wanted: WantedBlocks) -> Shares:
        """Return who reads what: this rank wants `wanted`, the others what their rings say."""
        indices = {other: bytes(fellow.ring.shown) for other, fellow in self._fellows.items()}
        return Shares(self._grid, rank, wanted, indices | {rank: bytes(self.ring.shown)})

    def begin(self, pull: Pulling, shares: Shares, silent_s: float) -> None:
        """Exchange blocks from now on.

        Args:
            pull: The pull.
            shares: Who reads what.
            silent_s: Leave a rank that has not been heard of for so many seconds.
        """
        self._pull, self._shares, self._silent_s = pull, shares, silent_s
        thread = threading.Thread(target=self._run, name="mx-local-ranks", daemon=True)
        thread.start()
        self._thread = thread

    # -- giving, on the transports' threads -------------------------------------------------------

    def hand_out(self, part: Part, blocks: Sequence[memoryview]) -> None:
        """Give others what they want of a part that is right. Waits for a free slot.

        Args:
            part: The part.
            blocks: The bytes of its blocks; not needed any more when this returns.
        """
        for piece, ranks in self._shares.pieces(part):
            held = blocks[piece.begin - part.begin : piece.end - part.begin]
            if not self._hand_out(piece, ranks, held):
                return

    def _hand_out(self, piece: Part, ranks: Sequence[int], blocks: Sequence[memoryview]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_over())
            if self._is_over():
                return False
            slot = self._free.pop()
            count = self.ring.begin_use(slot)
            to = self.ring.slot(slot, sum(len(block) for block in blocks))
        at = 0
        for block in blocks:
            to[at : at + len(block)] = block
            at += len(block)
        message = _MESSAGE.pack(_HANDED, piece.chunk, piece.begin, piece.end, slot, count)
        with self._changed:
            if self._is_over():
                return False
            takers = [self._fellows[rank] for rank in ranks if rank in self._fellows]
            self._awaited[slot] = {fellow.rank for fellow in takers}
            for fellow in takers:
                self._tell(fellow, message)
            if not takers:
                self._release(slot)
        return True

    def _is_over(self) -> bool:
        return self._closed or not self._fellows

    def _tell(self, fellow: Fellow, message: bytes) -> None:
        """Send a message. If it can't be sent, the thread will leave that rank. Call this under the
        lock, before `close`."""
        try:
            fellow.sock.send(message)
        except (BrokenPipeError, ConnectionResetError):
            pass  # what it said before its end is still to be heard
        except OSError:
            fellow.lost = True
            self._rouse()

    def _release(self, slot: int) -> None:
        self._awaited.pop(slot, None)
        self._free.append(slot)
        self._changed.notify_all()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._trade()
        except BaseException as error:  # noqa: BLE001 - it ends the pull
            self._pull.raised(error)

    def _trade(self) -> None:
        """Until the end, or until no other rank is left, act on what the others say."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            now_s = beat_s = time.monotonic()
            for fellow in self._fellows.values():
                fellow.heard_s = fellow.moved_s = now_s
                selector.register(fellow.sock, selectors.EVENT_READ, fellow)
            while not self._closed and self._fellows:
                for key, _ in selector.select(BEAT_S):
                    if key.data is None:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wake, 64)
                    elif not self._hear(key.data):
                        self._leave(selector, key.data, "it has ended")
                now_s = time.monotonic()
                if now_s - beat_s >= BEAT_S:
                    beat_s = now_s
                    self.beat()
                    for fellow in self._stuck(now_s):
                        self._leave(selector, fellow, "it makes no progress")
                for fellow in list(self._fellows.values()):
                    silent = now_s - fellow.heard_s > self._silent_s
                    if fellow.lost or (silent and not self._hears(fellow)):
                        self._leave(selector, fellow, "it does not answer")

    def _hears(self, fellow: Fellow) -> bool:
        """Return True if a rank that seems to be silent has said something after all."""
        before_s = fellow.heard_s
        return self._hear(fellow) and fellow.heard_s > before_s

    def _stuck(self, now_s: float) -> list[Fellow]:
        """Return the ranks that others wait for in vain: a callback of its caller may wait for
        another rank, and so hold up the threads that read."""
        until_s = now_s - _PATIENCE * self._silent_s
        return [
            fellow
            for fellow in self._fellows.values()
            if fellow.moved_s < until_s and self._pull.expects(fellow.rank)
        ]

    def beat(self) -> None:
        """Tell the others how many bytes have come."""
        message = _MESSAGE.pack(_ALIVE, 0, 0, 0, 0, self._pull.landed_nbytes())
        with self._changed:
            for fellow in self._fellows.values():
                self._tell(fellow, message)

    def _hear(self, fellow: Fellow) -> bool:
        """Act on some of the messages that have come. Returns False if no more will come."""
        for _ in range(_TURN):
            if self._closed:
                break
            try:
                message = fellow.sock.recv(_MESSAGE.size + 1)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                continue  # it closed before it had read all; what it sent comes yet, then the end
            except OSError:
                return False
            if not message:
                return False
            fellow.heard_s = time.monotonic()
            try:
                self._act(fellow, message)
            except PeerProtocolError as error:
                log.error("%s", error)
                return False
        return True

    def _act(self, fellow: Fellow, message: bytes) -> None:
        if len(message) != _MESSAGE.size:
            raise PeerProtocolError(f"rank {fellow.rank} on this host sent a malformed message")
        kind, chunk, begin, end, slot, count = _MESSAGE.unpack(message)
        if kind == _TAKEN:
            with self._changed:
                awaited = self._awaited.get(slot)
                if awaited is not None and self.ring.use(slot) == count:
                    awaited.discard(fellow.rank)
                    if not awaited:
                        self._release(slot)
        elif kind == _ALIVE and count != fellow.landed_nbytes:
            fellow.landed_nbytes, fellow.moved_s = count, fellow.heard_s
        elif kind == _HANDED:
            self._take(fellow, Part(chunk, begin, end), slot, count, message)

    def _take(self, fellow: Fellow, part: Part, slot: int, count: int, message: bytes) -> None:
        known = part.begin < part.end and self._shares.expects(fellow.rank, part)
        nbytes = self._grid.part_nbytes(part.chunk, part.begin, part.end) if known else 0
        if not 0 < nbytes <= ASIDE_BYTES or slot >= fellow.ring.slots:
            raise PeerProtocolError(f"rank {fellow.rank} on this host sent blocks of another rank")
        if fellow.ring.use(slot) == count:
            self._pull.write_given(part, fellow.ring.slot(slot, nbytes))
        if fellow.ring.use(slot) != count:
            return  # that rank has left this one, which sees so soon, and reads the part itself
        self._pull.given(fellow.rank, part)
        with self._changed:
            self._tell(fellow, bytes([_TAKEN]) + message[1:])

    def _leave(self, selector: selectors.BaseSelector, fellow: Fellow, why: str) -> None:
        selector.unregister(fellow.sock)
        with self._changed:
            del self._fellows[fellow.rank]
            for slot, awaited in list(self._awaited.items()):
                awaited.discard(fellow.rank)
                if not awaited:
                    self._release(slot)
            self._changed.notify_all()
        fellow.close()
        if self._pull.take_up(fellow.rank):
            log.warning(
                "rank %d on this host is left (%s): its share is read here too", fellow.rank, why
            )

    # -- the end ----------------------------------------------------------------------------------

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"!")

    def close(self) -> None:
        """End the exchange: from then on it writes nothing to the pull's memory. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._thread is not None:
                self._rouse()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        with self._changed:  # a transport's thread may still be handing something out
            for fellow in self._fellows.values():
                fellow.close()
            self._fellows.clear()
            self.ring.close()
            self._wake = self._woken = -1
            while self._pipe:
                os.close(self._pipe.pop())
