"""Reads spans of one safetensors file to the places of their tensors in an arena."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mx.buffers import address_of, copy_bytes
from mx.core.types import Layout
from mx.errors import CheckpointError
from mx.storage.header import FileStamp, TensorFile
from mx.storage.osfile import open_regular, read_error
from mx.units import align_up

#: Alignment of offsets, lengths and addresses for O_DIRECT; enough for every disk.
DIRECT_ALIGNMENT_BYTES = 4096
#: The most views of one preadv (the system's limit is 1024).
_MAX_VIEWS = 512


@dataclass(frozen=True, slots=True)
class SpanPiece:
    """Bytes [offset, offset + nbytes) of the layout's tensor `index`.

    They are at `position` in the file and belong at `place` in the arena.
    """

    index: int
    offset: int
    nbytes: int
    position: int
    place: int


class SpanReader:
    """One open file. `read` is thread-safe; `close` it when no read is running.

    `index_of` maps names to indices of the layout's tensors. `arena` is borrowed until `close`.

    Raises:
        CheckpointError: The file is gone, or changed since its header was read.
        ConfigError: This user may not read the file.
        LocalError: The disk fails.
    """

    def __init__(
        self, file: TensorFile, layout: Layout, index_of: Mapping[str, int], arena: memoryview
    ) -> None:
        self._file, self._layout, self._arena = file, layout, arena
        self._address = address_of(arena)
        self._tensors = []  # (index in the layout, first byte in the file, place in the arena)
        for tensor in file.tensors:
            index = index_of[tensor.spec.name]
            there = layout.tensors[index]
            same = (there.dtype, there.shape) == (tensor.spec.dtype, tensor.spec.shape)
            if not same or there.stride:  # files are row-major
                raise ValueError(f"the layout has another {tensor.spec.name!r}")
            if there.nbytes:
                place = layout.layers[there.layer].arena_offset + there.offset
                self._tensors.append((index, tensor.begin, place))
        self._begins = [begin for _, begin, _ in self._tensors]
        self._fd = self._direct_fd = -1
        try:
            self._fd = open_regular(file.location)
            self._direct_fd = _open_direct(file)
            self.check_unchanged()
        except OSError as error:
            self.close()
            raise read_error(error, file.location) from error
        except BaseException:
            self.close()
            raise

    def spans(self, span_nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the tensors' part of the file as [start, end) ranges.

        Args:
            span_nbytes: Ranges end at multiples of it, so that only the first start and the last
                end are misaligned; itself a multiple of `DIRECT_ALIGNMENT_BYTES`.
        """
        if not self._tensors:
            return
        start, end = self._begins[0], self._file.stamp.nbytes
        while start < end:
            cut = min(end, (start // span_nbytes + 1) * span_nbytes)
            yield start, cut
            start = cut

    def read(self, span: tuple[int, int], buffer: memoryview) -> list[SpanPiece]:
        """Read a span and put its bytes in place.

        Args:
            span: A range that `spans` yielded.
            buffer: Memory of this thread's own, page-aligned, and as long as a span.

        Returns:
            The pieces that landed.

        Raises:
            CheckpointError: The file has become too short.
            LocalError: The disk fails.
        """
        start, end = span
        pieces = list(self._pieces(start, end))
        if self._direct_fd < 0:
            self._read_into_place(pieces)
            return pieces
        try:
            if len(pieces) == 1 and self._fits(pieces[0]):
                piece = pieces[0]
                with self._arena[piece.place : piece.place + piece.nbytes] as here:
                    self._read_exactly(self._direct_fd, [here], start)
                return pieces
            base = start - start % DIRECT_ALIGNMENT_BYTES
            length = align_up(end - base, DIRECT_ALIGNMENT_BYTES)
            with buffer[:length] as window:
                self._read_exactly(self._direct_fd, [window], base, needed=end - base)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise read_error(error, self._file.location) from error
            # Some file systems allow O_DIRECT but require another alignment.
            self._read_into_place(pieces)
            return pieces
        for piece in pieces:
            first = piece.position - base
            with (
                buffer[first : first + piece.nbytes] as there,
                self._arena[piece.place : piece.place + piece.nbytes] as here,
            ):
                copy_bytes(here, there)
        return pieces

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file changed since its header was read."""
        if FileStamp.of(os.fstat(self._fd)) != self._file.stamp:
            raise CheckpointError(
                f"{self._file.location} changed while it was read",
                hint="wait until it is completely written, then try again",
            )

    def close(self) -> None:
        """Close the file. Idempotent."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def _pieces(self, start: int, end: int) -> Iterator[SpanPiece]:
        for i in range(bisect_right(self._begins, start) - 1, len(self._tensors)):
            index, begin, place = self._tensors[i]
            if begin >= end:
                return
            low = max(start, begin)
            high = min(end, begin + self._layout.tensors[index].nbytes)
            offset = low - begin
            yield SpanPiece(index, offset, high - low, low, place + offset)

    def _fits(self, piece: SpanPiece) -> bool:
        """Return True if O_DIRECT can read this piece into place, as both are aligned."""
        address = self._address + piece.place
        return not (piece.position | piece.nbytes | address) % DIRECT_ALIGNMENT_BYTES

    def _read_into_place(self, pieces: list[SpanPiece]) -> None:
        # Tensors follow one another in the file, so one call reads many of them.
        for first in range(0, len(pieces), _MAX_VIEWS):
            group = pieces[first : first + _MAX_VIEWS]
            with ExitStack() as stack:
                views = [
                    stack.enter_context(self._arena[p.place : p.place + p.nbytes]) for p in group
                ]
                try:
                    self._read_exactly(self._fd, views, group[0].position)
                except OSError as error:
                    raise read_error(error, self._file.location) from error

    def _read_exactly(
        self, fd: int, views: Sequence[memoryview], position: int, *, needed: int | None = None
    ) -> None:
        """Fill `views`, or at least their first `needed` bytes. Raises OSError, CheckpointError."""
        total = sum(view.nbytes for view in views)
        needed = total if needed is None else needed
        done = 0
        while done < needed:
            with ExitStack() as stack:
                got = os.preadv(fd, _rest(views, done, stack), position + done)
            done += got
            if got and done < needed and fd == self._direct_fd:
                # Later reads have to be aligned, so read the last, partial page again.
                got -= done % DIRECT_ALIGNMENT_BYTES
                done -= done % DIRECT_ALIGNMENT_BYTES
            if got <= 0:
                raise CheckpointError(
                    f"{self._file.location} ends at byte {position + done}, "
                    f"and had {self._file.stamp.nbytes} when it was opened",
                    hint="it was truncated while it was read: restore it and try again",
                )


def _open_direct(file: TensorFile) -> int:
    try:
        return open_regular(file.location, os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system has no O_DIRECT
            return -1
        raise


def _rest(views: Sequence[memoryview], done: int, stack: ExitStack) -> list[memoryview]:
    """Return the parts of `views` after their first `done` bytes."""
    if not done:
        return list(views)
    rest = []
    for view in views:
        if done < view.nbytes:
            rest.append(stack.enter_context(view[done:]))
        done = max(0, done - view.nbytes)
    return rest
