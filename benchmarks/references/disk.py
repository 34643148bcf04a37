"""Measures reading and hashing a checkpoint's files bare, into a memfd that is new and empty.

Threads share a queue of 4 MiB spans. Each reads a span with O_DIRECT, past the page cache, by one
`preadv` at an aligned offset, and hashes each MiB of it with blake3. The bytes end in the memfd in
the order of the file, header included, by one of three ways:

- *in place*: `preadv` writes into the memfd's map, and the MiB are hashed there;
- *memcpy*: `preadv` writes into the thread's own aligned buffer, the MiB are hashed there, and
  `memmove` copies the span into the map;
- *pwrite*: as memcpy, but `pwrite` copies the span into the memfd.

No tensor is looked for, nothing is compared, and nothing is kept of the digests.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3

WAYS = ("in place", "memcpy", "pwrite")

_MIB = 1 << 20
_SPAN = 4 * _MIB
#: Offsets, lengths and addresses of O_DIRECT; enough for every disk.
_ALIGNMENT = 4096


def load(paths: Sequence[Path], threads: int, way: str) -> float:
    """Return the seconds to open the files, make the memfd, read and hash; freeing is not timed.

    Args:
        paths: The files. The memfd holds one after the other, each at a multiple of 4 KiB.
        threads: How many threads read and hash.
        way: One of `WAYS`.

    Raises:
        OSError: A file can't be read with O_DIRECT, or shrank meanwhile.
    """
    with contextlib.ExitStack() as untimed:
        start_s = time.perf_counter()
        spans: deque[tuple[int, int, int, int]] = deque()  # file, offset, bytes, place
        place = 0
        for path in paths:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            untimed.callback(os.close, file)
            nbytes = os.fstat(file).st_size
            for at in range(0, nbytes, _SPAN):
                spans.append((file, at, min(_SPAN, nbytes - at), place + at))
            place += _align_up(nbytes)
        memfd = os.memfd_create("mx-bench", os.MFD_CLOEXEC)
        untimed.callback(os.close, memfd)
        os.ftruncate(memfd, place)
        room = untimed.enter_context(mmap.mmap(memfd, place))
        with ThreadPoolExecutor(threads) as pool:
            for worker in [pool.submit(_work, spans, memfd, room, way) for _ in range(threads)]:
                worker.result()
        return time.perf_counter() - start_s


def _work(spans: deque[tuple[int, int, int, int]], memfd: int, room: mmap.mmap, way: str) -> None:
    with mmap.mmap(-1, _SPAN) as own, memoryview(own) as buffer, memoryview(room) as target:
        while True:
            try:
                file, at, nbytes, place = spans.popleft()
            except IndexError:
                return
            base, offset = (target, place) if way == "in place" else (buffer, 0)
            # A file's last block is read as a whole, and comes as short as it is.
            with base[offset : offset + _align_up(nbytes)] as aligned:
                if os.preadv(file, [aligned], at) != nbytes:
                    raise OSError("the disk gave fewer bytes than were asked for")
            with base[offset : offset + nbytes] as span:
                for start in range(0, nbytes, _MIB):
                    blake3(span[start : start + _MIB]).digest()
                if way == "memcpy":
                    _memcpy(room, place, own, nbytes)
                elif way == "pwrite" and os.pwrite(memfd, span, place) != nbytes:
                    raise OSError("the memfd took fewer bytes than were given")


def _memcpy(room: mmap.mmap, place: int, own: mmap.mmap, nbytes: int) -> None:
    # Without the interpreter lock, which a slice assignment holds.
    to, origin = ctypes.c_char.from_buffer(room, place), ctypes.c_char.from_buffer(own)
    ctypes.memmove(ctypes.addressof(to), ctypes.addressof(origin), nbytes)


def _align_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
