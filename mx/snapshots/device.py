"""Reads a stored checkpoint into a GPU's memory: windows of its files come into slots, from which
they are copied to their places, where the GPU hashes them. No processor touches a byte of what
O_DIRECT has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from mx.contexts import Undo
from mx.cuda.device import Device
from mx.cuda.driver import load
from mx.cuda.staged import MOST_SLOTS, RING_BYTES, SLOT_BYTES, SlotPart, StagedSession
from mx.errors import MxError
from mx.fetching.stored import StoredModel, StoreSession
from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import StoredBytes
from mx.storage.stages import READ, StageClock, Stages
from mx.transport import DeviceView, Piece, Read, View, host_view, spans_of
from mx.units import align_up

#: Slots beyond those that threads fill: of these one is copied while others wait for their turn.
_MORE_SLOTS = 4
#: A window as one number: from the low bits its position in its file, its bytes, the file.
_POSITION_BITS, _NBYTES_BITS = 48, 24


class Windows:
    """The files of a model, in place of the model, for a `StoreSession` that fills slots."""

    most_threads = 0  # beyond those that there are slots for

    def __init__(self, files: Sequence[StoredBytes]) -> None:
        """
        Args:
            files: The files, open; the caller closes them.
        """
        self._files = files
        self.device = files[0].device

    def window(self, pieces: Sequence[Piece]) -> tuple[int, int, int]:
        """Return where the window begins in its file that holds these pieces of it, how long it is,
        and how long its slot has to be."""
        last = pieces[-1]
        is_disk = isinstance(self._files[last.region].device, int)
        alignment = DIRECT_ALIGNMENT_BYTES if is_disk else 1
        begin = pieces[0].region_offset - pieces[0].region_offset % alignment
        nbytes = last.region_offset + len(last.view) - begin
        return begin, nbytes, align_up(nbytes, alignment)

    def read(
        self,
        pieces: Sequence[tuple[int, View]],
        buffer: memoryview,
        landed: Callable[[int], None] = lambda nbytes: None,
        clock: StageClock | None = None,
    ) -> None:
        """Read windows, see `packed`, into slots. Raises MxError as `StoredBytes.read_exactly`."""
        del buffer, landed
        clock = clock or StageClock()
        for packed, slot in pieces:
            rest, position = divmod(packed, 1 << _POSITION_BITS)
            number, nbytes = divmod(rest, 1 << _NBYTES_BITS)
            self.fill(number, position, nbytes, slot)
            clock.lap(READ, nbytes)

    def fill(self, number: int, position: int, nbytes: int, slot: View) -> None:
        """Read `nbytes` from `position` of a file into a slot, the rest of which may be written
        to."""
        self._files[number].read_exactly(host_view(slot), position, nbytes)


class DiskSession(StagedSession):
    """Fills a GPU's memory from a stored model, as `StoreSession` fills the host's."""

    _inner: StoreSession

    def __init__(
        self,
        device: str,
        model: StoredModel,
        threads: int,
        on_idle: Callable[[], None],
        *,
        windows: Windows | None = None,
        detail: str = "",
    ) -> None:
        """
        Args:
            device: The GPU, as `Device.open` takes it.
            model: What is read. Its owner closes it after `join`.
            threads: How many threads read.
            on_idle: As for `StoreSession`.
            windows: What fills slots, if not the model's files do.
            detail: For the report: how it is read.

        Raises:
            CudaError: The driver fails: so much memory can't be pinned.
        """
        self.detail = detail
        #: Returns True while something else may bring what is not to be read here.
        self.awaits: Callable[[], bool] = lambda: False
        self._model, self._on_idle = model, on_idle
        self._windows = windows or Windows(model.files)
        opened = Device.open(load(), device)
        with Undo(opened.close):
            inner = StoreSession(cast("Any", self._windows), threads, on_idle)
            with Undo(inner.join), Undo(inner.close):
                super().__init__(
                    inner,
                    opened,
                    slot_nbytes=SLOT_BYTES + 2 * DIRECT_ALIGNMENT_BYTES,
                    slots=min(MOST_SLOTS, max(RING_BYTES // SLOT_BYTES, threads + _MORE_SLOTS)),
                )

    @property
    def stages(self) -> Stages:
        """Where the time of the threads that read went."""
        return self._inner.stages

    @property
    def failure(self) -> MxError | None:
        """What ended it."""
        return self._inner.failure

    @property
    def idle(self) -> bool:
        """True while nothing is being read, nor is to be."""
        return not self._jobs and self._inner.idle and not self.awaits()

    @property
    def closed(self) -> bool:
        """True once it was closed."""
        return self._closed

    def join(self, timeout_s: float | None = None) -> bool:
        """See `mx.transport.Session`."""
        joined = super().join(timeout_s)
        if joined:
            self._device.close()
        return joined

    # -- what goes through one slot: pieces of one file, by its number and their positions there ---

    def _cut(self, read: Read) -> Iterator[tuple[list[Piece], int]]:
        places = [(piece.region_offset, piece.view) for piece in read.pieces]
        for run in self._model.runs(places, SLOT_BYTES):
            yield (
                [Piece(bit.file, bit.position, bit.view) for bit in run],
                sum(bit.nbytes for bit in run),
            )

    def _pieces(self, part: SlotPart, slot: View) -> list[Piece]:
        if not part.pieces:  # of a read of nothing
            return []
        begin, nbytes, slot_nbytes = self._windows.window(part.pieces)
        place = (part.pieces[0].region << _NBYTES_BITS | nbytes) << _POSITION_BITS | begin
        return [Piece(0, place, slot[:slot_nbytes])]

    def _places(self, part: SlotPart) -> Iterator[tuple[int, int, int]]:
        begin = self._windows.window(part.pieces)[0] if part.pieces else 0
        for piece in part.pieces:
            at = piece.region_offset - begin
            for span in spans_of(piece.view):
                assert isinstance(span, DeviceView)  # `_job` has looked
                yield span.address, at, len(span)
                at += len(span)

    def _finish(self, part: SlotPart) -> None:
        super()._finish(part)
        if self.idle:
            self._on_idle()
