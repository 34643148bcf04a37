"""Measures the least that it takes to fill many tensors of torch where they are.

Whatever fills memory that it does not own has to look at each tensor's form and place before, and
whether the place is still the tensor's after; this does each once, by `map` over torch's own
accessors, in batches that stay in the cache. The bytes come by calls with a place for each of many
tensors: from a memfd by `preadv`, or over sockets by `recvmsg_into`. Each tensor is hashed as soon
as it is there, with xxh3_128 from the memfd and with blake3 from sockets, as mx does. Nothing is
compared; there is no control, and no plan but the order of the tensors.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

_BATCH = 256
_STEP_BYTES = 2 << 20
_FORM: tuple[Callable[[torch.Tensor], object], ...] = (
    *map(attrgetter, ("dtype", "shape", "layout", "is_cpu")),
    torch.Tensor.stride,
    torch.Tensor.is_neg,
    torch.Tensor.storage_offset,
)


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor, whose form is looked at, too."""
    found: list[int] = []
    for at in range(0, len(tensors), _BATCH):
        some = tensors[at : at + _BATCH]
        for accessor in _FORM:
            list(map(accessor, some))
        list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, some)))
        found += map(torch.Tensor.data_ptr, some)
    return found


class Scattered:
    """Tensors of one size to fill, from a memfd that has their bytes one after the other."""

    def __init__(self, tensors: Sequence[torch.Tensor], memfd: int, port: int) -> None:
        """
        Args:
            tensors: The tensors.
            memfd: The descriptor of the bytes.
            port: Where a `RawSockets` sends them.
        """
        self._tensors, self._memfd, self._port = tensors, memfd, port
        self._nbytes = tensors[0].nbytes

    def read(self, threads: int) -> float:
        """Return the seconds to fill all tensors from the memfd."""
        return self._filled(self._read, threads)

    def receive(self, threads: int) -> float:
        """Return the seconds to fill all tensors over as many connections."""
        return self._filled(self._receive, threads)

    def _filled(self, fill: Callable[[memoryview, list[int], int], None], threads: int) -> float:
        began_s = time.perf_counter()
        places = _places(self._tensors)
        low = min(places)
        room = (ctypes.c_ubyte * (max(places) + self._nbytes - low)).from_address(low)
        memory = memoryview(room).cast("B")
        shifts = [place - low for place in places]
        step = -(-len(shifts) // threads)
        with ThreadPoolExecutor(threads) as pool:
            parts = [
                pool.submit(fill, memory, shifts[first : first + step], first)
                for first in range(0, len(shifts), step)
            ]
            for part in parts:
                part.result()
        if _places(self._tensors) != places:
            raise ValueError("the tensors have moved")
        return time.perf_counter() - began_s

    def _views(self, memory: memoryview, shifts: list[int], at: int) -> list[memoryview]:
        """Return the memory of the tensors of one step."""
        nbytes = self._nbytes
        some = shifts[at : at + _STEP_BYTES // nbytes]
        return [memory[shift : shift + nbytes] for shift in some]

    def _read(self, memory: memoryview, shifts: list[int], first: int) -> None:
        at = 0
        while at < len(shifts):
            views = self._views(memory, shifts, at)
            got = os.preadv(self._memfd, views, (first + at) * self._nbytes)
            if got != len(views) * self._nbytes:
                raise OSError("the memfd has ended")
            for view in views:
                xxh3_128_digest(view)
            at += len(views)

    def _receive(self, memory: memoryview, shifts: list[int], first: int) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            begin, end = first * self._nbytes, (first + len(shifts)) * self._nbytes
            connection.sendall(struct.pack("<QQ", begin, end))
            at = 0
            while at < len(shifts):
                views = self._views(memory, shifts, at)
                got = connection.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
                if got != len(views) * self._nbytes:
                    raise ConnectionError("the reference server went away")
                for view in views:
                    blake3(view).digest()
                at += len(views)
