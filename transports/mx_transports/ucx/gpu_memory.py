"""Memory of a GPU as agents in processes of their own import it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from mx.errors import LocalError
from mx.transport import DeviceView
from mx_transports.toolkit.cuda.exposure import Exports
from mx_transports.ucx.agent_process import GpuImport

#: What an agent is told of has the handles of so many.
MAX_ALLOCATIONS = 512


class GpuImports:
    """The allocations that some memory of one GPU lies in. `gpu` is its UUID.

    Raises:
        LocalError: They can't be imported by other processes, are of several GPUs, or too many.
        CudaError: CUDA fails.
        ConfigError: This process does not see the GPU.
    """

    def __init__(self, spans: Sequence[DeviceView]) -> None:
        self._exports = Exports(spans)
        self.allocations = self._exports.allocations
        self._bases = [each.base for each in self.allocations]
        self.gpu = "".join(self._exports.uuids[:1])
        if len(self._exports.uuids) != 1 or len(self._bases) > MAX_ALLOCATIONS:
            self.close()
            raise LocalError(f"it is not in at most {MAX_ALLOCATIONS} allocations of one GPU")

    def new(self) -> list[GpuImport]:
        """Return what another process opens them by, with new descriptors, which the caller closes.

        Raises:
            CudaError: CUDA fails.
        """
        found: list[GpuImport] = []
        try:
            for each in self.allocations:
                descriptor = -1 if each.handle else self._exports.descriptor(each)
                found.append((each.nbytes, each.handle.hex(), descriptor))
        except BaseException:
            for _, _, descriptor in found:
                if descriptor >= 0:
                    os.close(descriptor)
            raise
        return found

    def parts(self, address: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield, for each allocation that some of the memory lies in, its number, where in it the
        part begins, and the bytes of the part. What is in none is not yielded."""
        end = address + nbytes
        while address < end:
            number = bisect_right(self._bases, address) - 1
            if number < 0 or address >= self.allocations[number].end:
                return
            found = self.allocations[number]
            take = min(end, found.end) - address
            yield number, address - found.base, take
            address += take

    def close(self) -> None:
        """Give up what was exported. No process has it open any more. Idempotent."""
        self._exports.close()
