"""Host memory that the driver made, for models that GPUs of other processes read."""

from __future__ import annotations

from mx.buffers import memory_at
from mx.cuda.driver import load
from mx.cuda.errors import CudaUnavailableError
from mx.cuda.vmm import DriverHostMemory
from mx.memory.arena import HostMemory
from mx.memory.budget import require


class PinnedArena(HostMemory):
    """`nbytes` of host memory that the driver made (`mx.cuda.vmm.DriverHostMemory`).

    `view` is writable and lives as long as anything refers to it; `release` only drops this
    object's own reference. Other processes copy from it, and can't attach to it.

    Raises:
        CapacityError: There is too little memory.
        ConfigError: There is no GPU, or its driver makes no such memory.
        CudaError: The driver fails.
    """

    def __init__(self, nbytes: int) -> None:
        require(nbytes, "the model")
        try:
            memory = DriverHostMemory(load(), max(nbytes, 1))
        except CudaUnavailableError as error:
            raise CudaUnavailableError(error.message, hint="serve without `pinned`") from None
        self.address = memory.address
        self.view = memory_at(memory.address, nbytes, memory)

    def seal(self) -> None:
        """Do nothing: it has no descriptor that could be sealed."""
