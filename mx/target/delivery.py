"""What becomes of a layer whose bytes have landed: checked once more, written, announced."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from mx.core.types import Manifest
from mx.target.events import EventLog, Outcome
from mx.target.output import Output
from mx.target.report import LayerEvent, Reporting, VerifiedBy
from mx.target.transfer import Transfer
from mx.target.verify import Verifier
from mx.transport import Span


class Delivery:
    """One pull's. Layers come on any thread. `outcome` is told when every layer was announced, and
    what goes wrong.

    With `out`, raises what `CheckpointWriter` raises, and wants `finish` or `abort`; `keep` is
    that writer's. With `strong`, wants `settle`.
    """

    def __init__(
        self,
        manifest: Manifest,
        log: EventLog,
        outcome: Outcome,
        *,
        strong: bool,
        out: Path | None,
        keep: bool = False,
    ) -> None:
        self._manifest = manifest
        self._log = log
        self._outcome = outcome
        self._verifier = Verifier(manifest) if strong else None
        self._output = None if out is None else Output(out, manifest, outcome.broken, keep=keep)

    @property
    def resumable(self) -> bool:
        """Has an earlier pull left anything to go on from?"""
        return self._output is not None and bool(self._output.left)

    def resume(self, transfer: Transfer, cancelled: Callable[[], bool]) -> None:
        """Read what an earlier pull has written into the engine's arena, in host memory, and tell
        it what of that is right, before it has lanes. Blocks."""
        assert self._output is not None
        for layer in self._output.left:
            if cancelled():
                return
            began_s = time.monotonic()
            place = self._manifest.layout.layers[layer]
            view = transfer.arena[place.arena_offset : place.arena_offset + place.nbytes]
            chunks = self._output.read_back(layer, view)
            transfer.prefill("resume", self._output.folder, chunks, time.monotonic() - began_s)

    def landed(self, arena: Span, layer: int) -> None:
        """Every chunk of the layer is there and was verified by its digest."""
        if self._verifier is None:
            self.announce(arena, layer, VerifiedBy.DIGEST)
            return
        self._verifier.submit(
            arena,
            layer,
            lambda: self.announce(arena, layer, VerifiedBy.STRONG),
            self._outcome.broken,
        )

    def attached(self, arena: Span, layer: int) -> None:
        """The source's sealed memory was mapped. Blocks, with `strong` for a look at every byte:
        raises DigestError."""
        if self._verifier is None:
            self.announce(arena, layer, VerifiedBy.SOURCE)
            return
        self._verifier.check_all(arena, layer)
        self.announce(arena, layer, VerifiedBy.STRONG)

    def announce(self, arena: Span, layer: int, by: VerifiedBy) -> None:
        place = self._manifest.layout.layers[layer]
        if self._output is not None:
            start = place.arena_offset
            self._output.layer_ready(layer, arena[start : start + place.nbytes])
        at_s = time.monotonic() - self._log.started_s
        event = LayerEvent(layer, place.name, place.nbytes, by.value, at_s, self._log.tensors_of)
        with Reporting(self._outcome.broken):  # of what a callback raises
            if self._log.layer_ready(event):
                self._outcome.complete()

    def side_page(self, digest: bytes, offset: int, data: bytes) -> None:
        """Some bytes of the side files of this digest; at offset 0 they begin anew. Blocks, and
        raises what `CheckpointWriter` raises."""
        if self._output is not None:
            self._output.side_page(digest, offset, data)

    # -- the end; these block --------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the checks that run, drop those that don't yet."""
        if self._verifier is not None:
            self._verifier.close()

    def finish(self) -> None:
        """Wait until everything is written, and commit it. Raises OutputError, CapacityError."""
        if self._output is not None:
            self._output.finish()

    def abort(self) -> str:
        """Settle, and remove what was written, or keep it: returns how to go on from there, or
        ""."""
        self.settle()
        return "" if self._output is None else self._output.abort()
