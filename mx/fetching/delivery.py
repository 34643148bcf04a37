"""Handles layers that are verified: writes them, and fires their events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING

from mx.fetching.report import VerifiedBy

if TYPE_CHECKING:
    from mx.core.types import Companion, Layout, Manifest
    from mx.fetching.edition import EditionLog
    from mx.fetching.transfer import Transfer
    from mx.memory.device import HostReader
    from mx.storage.output import Output
    from mx.storage.writer import CheckpointWriter
    from mx.transport import View


class Delivery:
    """One pull's `TransferListener`; thread-safe. It reports to `log` which layers are
    ready, and what goes wrong.

    With `out` (and `keep`, see `CheckpointWriter`, whose errors this raises) the caller calls
    `finish` or `abort`. With `strong` attached memory is hashed too, and the caller calls `settle`.
    """

    def __init__(
        self,
        manifest: Manifest,
        log: EditionLog,
        *,
        strong: bool,
        out: Path | None,
        keep: bool = False,
        companions: Sequence[Companion] = (),
        revision: str = "",
        layout: Layout | None = None,
        page: Callable[[int], bytes | None] = lambda layer: None,
        writer: Callable[..., CheckpointWriter] | None = None,
    ) -> None:
        self._revision = revision
        self._manifest = manifest
        self._layers = (layout or manifest.layout).layers  # as they are delivered
        self._log = log
        self.connection_lost = log.connection_lost
        self.failed = log.failed
        self.broken = log.broken
        self._strong = strong
        self._reader: HostReader | None = None
        if strong:
            from mx.memory.device import HostReader

            self._reader = HostReader()
        #: How the transferred layers were verified: by another rank, or the shortcut, if any were.
        self.verified_by = VerifiedBy.STRONG if strong else VerifiedBy.DIGEST
        #: Layers whose tensors share memory with each other, and those of them that have landed.
        self._together: Set[int] = frozenset()
        self._landed: dict[int, VerifiedBy] = {}
        self._lock = threading.Lock()  # guards what has landed of them
        #: Those that `out` gets beside the main weights.
        self.companions = companions
        self._output: Output | None = None
        if out is not None:
            from mx.storage.output import Output

            self._output = Output(
                out, manifest, log.raised, page, keep=keep, companions=companions, writer=writer
            )

    @property
    def written_nbytes(self) -> int:
        """The bytes of tensors that were written to `out` so far."""
        return 0 if self._output is None else self._output.written_nbytes

    @property
    def resumable(self) -> bool:
        """Return True if an earlier pull has left layers on disk to go on from."""
        return self._output is not None and bool(self._output.left)

    def resume(self, transfer: Transfer, cancelled: Callable[[], bool]) -> None:
        """Read the layers that an earlier pull has written into the transfer's arena, and prefill
        their right chunks. Call it before the first connection. Blocks."""
        assert self._output is not None
        for layer in self._output.left:
            if cancelled():
                return
            began_s = time.monotonic()
            chunks = self._output.read_back(layer, self.place(transfer.arena, layer))
            transfer.prefill("resume", self._output.folder, chunks, time.monotonic() - began_s)

    def layer_ready(self, layer: int, arena: View, by: VerifiedBy) -> None:
        """Deliver a layer: every chunk of it is in the arena, and right."""
        if self._strong:
            by = VerifiedBy.STRONG
        elif by is not VerifiedBy.DIGEST and self.verified_by is not VerifiedBy.RANK:
            self.verified_by = by
        if layer not in self._together:
            self.announce(arena, layer, by)
            return
        with self._lock:
            self._landed[layer] = by
            if len(self._landed) < len(self._together):
                return
        with self._log.guard():
            from mx.memory.verify import check_overlapping

            check_overlapping(self._manifest, arena, self._together)
            for each, by in sorted(self._landed.items()):
                self.announce(arena, each, by)

    def deliver_together(self, layers: Set[int]) -> None:
        """Deliver these layers once all of them are there, and right: their tensors share memory,
        so that reading one writes to the other. Call it before the first connection."""
        self._together = layers

    def check_attached(self, arena: View) -> None:
        """With `strong`, hash every byte of a source's mapped memory, on a GPU piece by piece.
        Blocks.

        Raises:
            DigestError: A tensor is wrong.
        """
        if self._reader is not None:
            for layer in range(len(self._manifest.layout.layers)):
                from mx.memory.verify import check_layer

                check_layer(self._manifest, arena, layer, self._reader)

    def announce(self, arena: View, layer: int, by: VerifiedBy) -> None:
        """Write a layer that is ready, and fire its event."""
        if self._output is not None:
            self._output.layer_ready(layer, self.place(arena, layer))
        with self._log.guard():  # callbacks may raise
            if self._log.layer_ready(self._layers[layer], by, self._revision):
                self._log.complete()

    def place(self, arena: View, layer: int) -> View:
        """Return a layer's part of an arena."""
        place = self._manifest.layout.layers[layer]
        return arena[place.arena_offset : place.arena_offset + place.nbytes]

    def side_page(self, digest: bytes, offset: int, data: bytes) -> None:
        """Write some bytes of the side files with this digest; at offset 0 they begin anew. Blocks,
        and raises errors of `CheckpointWriter`."""
        if self._output is not None:
            self._output.side_page(digest, offset, data)

    def companion_folder(self, number: int) -> Path | None:
        """Return the folder to write a companion to; None if it is complete there. Blocks."""
        assert self._output is not None
        return self._output.companion_folder(number)

    # -- the end; these methods block ------------------------------------------------------------

    def settle(self) -> None:
        """Free what hashing needs. Idempotent."""
        if self._reader is not None:
            self._reader.close()

    def finish(self) -> None:
        """Wait until everything is written, and commit it. Raises OutputError, CapacityError."""
        if self._output is not None:
            self._output.finish()

    def abort(self) -> str:
        """Settle, and remove what was written, or keep it. Returns how to go on from what is kept,
        or ""."""
        self.settle()
        return "" if self._output is None else self._output.abort()
