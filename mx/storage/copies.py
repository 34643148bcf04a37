"""Compares the copies of a tensor that several files of one checkpoint hold."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import ExitStack, closing

from mx.storage.disk_file import DIRECT_ALIGNMENT_BYTES
from mx.storage.header import StoredBytes, StoredFile
from mx.storage.shards import Copy, ambiguous
from mx.units import MIB

_PIECE_BYTES = 4 * MIB


def check_copies(copies: Sequence[Copy]) -> None:
    """Read both of each pair of tensors, and compare their bytes. Blocks.

    Args:
        copies: Tensors of one dtype and shape each.

    Raises:
        ConfigError: Some bytes differ.
        MxError: As `StoredFile.open` and `StoredBytes.window`.
    """
    if not copies:
        return
    with ExitStack() as stack:
        opened: dict[str, StoredBytes] = {}

        def bytes_of(file: StoredFile) -> StoredBytes:
            if file.path not in opened:
                opened[file.path] = stack.enter_context(closing(file.open()))
            return opened[file.path]

        nbytes = _PIECE_BYTES + 2 * DIRECT_ALIGNMENT_BYTES
        buffers = [stack.enter_context(memoryview(mmap.mmap(-1, nbytes))) for _ in range(2)]
        for copy in copies:
            one, two = bytes_of(copy.first), bytes_of(copy.second)
            for at in range(0, copy.here.end - copy.here.begin, _PIECE_BYTES):
                begin, other = copy.here.begin + at, copy.there.begin + at
                end = min(begin + _PIECE_BYTES, copy.here.end)
                with (
                    one.window(begin, end, buffers[0]) as here,
                    two.window(other, other + end - begin, buffers[1]) as there,
                ):
                    if here != there:
                        raise ambiguous(copy, "other bytes")
