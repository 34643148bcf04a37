"""The blocks that one connection reads from a GPU's memory into the host, hashed on that GPU."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mx.core.grid import ChunkGrid
from mx.cuda import blake3
from mx.cuda.device import Device
from mx.cuda.digest import BlockDigester
from mx.cuda.driver import load
from mx.threads import Threads
from mx.units import GIB
from mx.views import ScatteredView, device_of

if TYPE_CHECKING:
    from mx.cuda.digest_table import DigestTable

log = logging.getLogger(__name__)

#: Of a smaller model the processors hash all before a process's first kernel is there, which takes
#: some seconds to compile.
LEAST_BYTES = 16 * GIB


def is_worth_while(nbytes: int) -> bool:
    """Return True if a GPU is to hash a model of so many bytes."""
    return nbytes >= LEAST_BYTES or blake3.is_compiled()


class SourceDigests:
    """Hashes a source's memory where it is, behind the copies out of it. Thread-safe, but for
    `close`.

    What is hashed is what was copied as long as the source does not write, which its generation
    tells: so this is for memory of this user's own processes.
    """

    def __init__(
        self, grid: ChunkGrid, view: ScatteredView, page_of: Callable[[int], bytes | None]
    ) -> None:
        """
        Args:
            grid: How the model is cut.
            view: The source's memory, all on one GPU, at this process's addresses. It is mapped
                while anything that is queued here runs.
            page_of: As for `DigestTable`.
        """
        self._ends = contextlib.ExitStack()
        self._threads = Threads(1, "mx-digest")
        self._made = self._threads.submit(self._make, grid, view, page_of)

    def _make(
        self, grid: ChunkGrid, view: ScatteredView, page_of: Callable[[int], bytes | None]
    ) -> DigestTable:
        from mx.cuda.digest_table import DigestTable  # and numpy with it

        with contextlib.ExitStack() as undo:
            device = undo.enter_context(Device.open(load(), device_of(view)))
            kernel = undo.enter_context(contextlib.closing(BlockDigester(device))).kernel
            table = DigestTable(grid, view, page_of, lambda: kernel)
            undo.callback(table.close)
            self._ends = undo.pop_all()
        return table

    @property
    def table(self) -> DigestTable | None:
        """The table of the blocks; None while the GPU has no kernel, or if it gets none."""
        made = self._made
        return made.result() if made.done() and made.exception() is None else None

    def close(self) -> None:
        """Free everything. Nothing that was queued runs any more."""
        self._threads.shutdown()
        if (error := self._made.exception()) is not None:
            log.info("what the GPU held was hashed by the processor: %s", error)
        self._ends.close()
