"""Moves weights through a process group, bucket by bucket, and compares what lands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from mx.core.digest import DIGEST_BYTES
from mx.core.grid import BLOCK_BYTES, Layer, block_count
from mx.core.types import Manifest
from mx.cuda.device import find_ordinal
from mx.cuda.driver import load
from mx.errors import DigestError, LocalError
from mx.fleet.buckets import BUCKET_BYTES, Bucket, BucketPart, cut_buckets
from mx.fleet.process_group import CollectiveStep, ProcessGroup, settle
from mx.memory.extras import torch_missing
from mx.memory.live import LiveMemory, Memory
from mx.memory.verify import check_overlapping
from mx.text import listed
from mx.threads import Threads
from mx.views import ScatteredView, Span, contiguous, cut

try:
    import torch
except ModuleNotFoundError as error:
    raise torch_missing(error) from None

#: Buckets that are on the wire while another one is hashed.
_AHEAD = 2
_HASHING_THREADS = 2


class _DeviceBytes:
    """Bytes of a GPU, for torch, which keeps this object."""

    def __init__(self, span: Any) -> None:
        self.span = span
        self.__cuda_array_interface__ = {
            "shape": (len(span),),
            "typestr": "|u1",
            "data": (span.address, False),
            "version": 3,
        }


class Mover:
    """The buckets of one broadcast, on one rank.

    `kinds` are the devices of this rank's memory: 1 for the host, 2 for GPUs, 3 for both. `error`
    is what this rank found wrong while it moved them: it goes on nevertheless, in step with the
    others.
    """

    def __init__(
        self,
        ranks: ProcessGroup,
        manifest: Manifest,
        pages: Sequence[bytes],
        memory: Memory,
        on_layer: Callable[[Layer], None] | None,
    ) -> None:
        """
        Args:
            ranks: The group.
            manifest: The weights.
            pages: The digests of each layer's blocks.
            memory: This rank's memory of all of them.
            on_layer: As for `broadcast`.
        """
        self._ranks, self.manifest, self._pages = ranks, manifest, pages
        self._memory, self._view, self._on_layer = memory, memory.view, on_layer
        self._gives = ranks.rank == ranks.src
        self._overlapping = memory.overlapping if isinstance(memory, LiveMemory) else frozenset()
        self._layers = 0  # those that `on_layer` knows of
        self._staging: list[torch.Tensor] = []
        self._ordinals: dict[str, int] = {}
        self.error: Exception | None = None
        spans = self._view.located()[1] if isinstance(self._view, ScatteredView) else [self._view]
        self.kinds = sum({1 if isinstance(span, memoryview) else 2 for span in spans})

    def run(self, kinds: Sequence[int]) -> None:
        """Move all buckets. When this returns or raises nothing uses the memory any more, unless it
        was interrupted again while it waited for that.

        Args:
            kinds: Those of all ranks.

        Raises:
            PeerLostError, PeerTimeoutError: The group broke.
            LocalError: This rank can't go on, which breaks the group.
        """
        # All ranks use one back-end: that of their memory, if it is of one kind.
        kind = {1: "cpu", 2: "cuda"}.get(set(kinds).pop() if len(set(kinds)) == 1 else 0, "cpu")
        supported = self._ranks.kinds
        wire = self._ranks.device(kind if kind in supported else min(supported))
        under_way: deque[tuple[CollectiveStep, Bucket, list[Span], torch.Tensor | None]] = deque()
        try:
            with Threads(_HASHING_THREADS, "mx-hash") as threads:
                for bucket in cut_buckets(self.manifest.layout):
                    under_way.append(self._start(bucket, wire))
                    if len(under_way) > _AHEAD:
                        self._finish(*under_way.popleft(), threads)
                while under_way:
                    self._finish(*under_way.popleft(), threads)
        except BaseException as error:
            self._ranks.drain()
            if isinstance(error, RuntimeError):  # torch's, of a GPU's memory for instance
                raise LocalError(f"this rank can't go on: {error}") from error
            raise
        finally:
            self._staging.clear()
        self._try(self._end)

    def _try(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do this rank's own work, unless it has failed already."""
        if self.error is None:
            try:
                work(*arguments)
            except Exception as error:  # noqa: BLE001 - all ranks raise it at the end
                self.error = error

    def _start(
        self, bucket: Bucket, wire: torch.device
    ) -> tuple[CollectiveStep, Bucket, list[Span], torch.Tensor | None]:
        places = [(part.arena_offset, part.nbytes) for part in bucket.parts]
        spans = list(map(contiguous, cut(self._view, places)))
        if len(spans) == 1:
            alone = self._tensor(spans[0])
            if alone.device == wire:
                return self._ranks.start(alone), bucket, spans, None
        # In turn: the last `_AHEAD` may be in use.
        if len(self._staging) <= _AHEAD:
            whole = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=wire)
        else:
            whole = self._staging.pop(0)
        self._staging.append(whole)
        staged = whole[: bucket.nbytes]
        if self._gives:
            self._copy(spans, staged)
        return self._ranks.start(staged), bucket, spans, staged

    def _finish(
        self,
        step: CollectiveStep,
        bucket: Bucket,
        spans: list[Span],
        staged: torch.Tensor | None,
        threads: Threads,
    ) -> None:
        step.wait()
        if not self._gives:
            if staged is not None:
                self._try(self._copy, spans, staged)
            self._try(self._check, bucket.parts, spans, threads)
        self._try(self._report, bucket.layers)

    def _copy(self, spans: list[Span], staged: torch.Tensor) -> None:
        """Copy between tensors and what is sent: from there on a receiver."""
        at = 0
        for span in spans:
            there, here = staged[at : at + len(span)], self._tensor(span)
            at += len(span)
            if self._gives:
                there.copy_(here)
            else:
                here.copy_(there)
        settle(staged.device)

    def _tensor(self, span: Span) -> torch.Tensor:
        """Return bytes as a tensor of bytes, which keeps their memory."""
        if isinstance(span, memoryview):
            return torch.frombuffer(span, dtype=torch.uint8)
        if span.device not in self._ordinals:
            self._ordinals[span.device] = find_ordinal(load(), span.device)
        return torch.as_tensor(_DeviceBytes(span), device=f"cuda:{self._ordinals[span.device]}")

    def _check(self, parts: Sequence[BucketPart], spans: Sequence[Span], threads: Threads) -> None:
        """Compare what has landed with the identity. Raises DigestError."""
        checked = [
            (part, span)
            for part, span in zip(parts, spans, strict=True)
            if part.layer not in self._overlapping  # written to once more, and checked in the end
        ]
        blocks = [
            span[at : at + BLOCK_BYTES]
            for _, span in checked
            for at in range(0, len(span), BLOCK_BYTES)
        ]
        half = -(-len(blocks) // 2)
        digests = b"".join(threads.map(self._digests, [blocks[:half], blocks[half:]]))
        at, wrong = 0, []
        for part, _ in checked:
            nbytes = DIGEST_BYTES * block_count(part.nbytes)
            begin = DIGEST_BYTES * part.block
            if digests[at : at + nbytes] != self._pages[part.layer][begin : begin + nbytes]:
                wrong.append(self.manifest.layout.tensors[part.tensor].name)
            at += nbytes
        if wrong:
            raise DigestError(
                f"{listed(wrong)}: got other bytes than the identity says: rank {self._ranks.src} "
                "has changed them meanwhile, or they were damaged on their way"
            )

    def _digests(self, blocks: Sequence[Span]) -> bytes:
        return self._memory.hasher(blocks).block_digests() if blocks else b""

    def _report(self, layers: int) -> None:
        """Report the layers up to this number, those that `_end` checks not before it."""
        if self._on_layer is None:
            return
        for layer in self.manifest.layout.layers[self._layers : layers]:
            if self._overlapping and not self._gives:
                return
            self._layers += 1
            self._on_layer(layer)

    def _end(self) -> None:
        """Check what only the whole shows. Raises ConfigError, LocalError."""
        if not self._gives:
            check_overlapping(self.manifest, self._view, self._overlapping)
            self._overlapping = frozenset()
        moved = self._memory.changed() if isinstance(self._memory, LiveMemory) else ""
        if moved:
            raise LocalError(moved, hint="leave tensors where they are during a broadcast")
        self._report(len(self.manifest.layout.layers))
