"""Reads a whole model from a store: by request, or because no source has described it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

from mx import packs
from mx.core.types import Layout
from mx.errors import CheckpointError
from mx.fetching.attempt import Attempt, Context
from mx.fetching.edition import Edition
from mx.fetching.opening import layout_version
from mx.fetching.options import PullOptions
from mx.fetching.report import PathReport, PullReport, StageReport, VerifiedBy
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.memory.verify import check_overlapping
from mx.runtime import in_thread, uncut
from mx.storage.disk_file import arena_shift
from mx.storage.load import LoadedCheckpoint, load_opened
from mx.storage.safetensors import Checkpoint
from mx.storage.stages import OPEN, Stages
from mx.storage.staging import Staging
from mx.storage.stores import OBJECTS, CheckpointStore
from mx.stores import Opening
from mx.wire.locate import write_side_files


class FromStore(Attempt):
    """One attempt to read all of the model from a store; `last` is True if no other one follows.

    With a selection it is read and hashed whole all the same, through bounded buffers: its identity
    is that of all its bytes.
    """

    def __init__(
        self, context: Context, edition: Edition, store: CheckpointStore, *, last: bool
    ) -> None:
        super().__init__(context, edition)
        options = context.options
        self._store = store
        self._stages = Stages()
        self._expected = context.history.named if options.bound else None
        # What is delivered can't be taken back: a later step, a pin or `out` needs all of it first.
        alone = not (options.pin or self._expected or options.out or options.selection)
        self._early = last and alone and options.device == "cpu"
        # Where ranks on this host share what is read: by this one, and what each other has given.
        self._read_nbytes = 0
        self._given_nbytes: dict[int, int] = {}

    async def run(self) -> PullReport:
        """Read, deliver and commit the model.

        Raises:
            CheckpointError: The checkpoint is malformed, or not the pinned or expected one.
            MxError: As `CheckpointStore.open` and `load_opened`, and for `out` as `Staging`.
        """
        options, store = self._options, self._store
        # Uncut: once the pull is closed no thread may write to `into`.
        version = await layout_version(options, self._history.named)
        loaded = await uncut(in_thread(self._load, asyncio.get_running_loop(), version))
        manifest, arena = loaded.manifest, loaded.arena
        if isinstance(arena, SubsetMemory):
            self.edition.subset, arena = arena.subset, arena.memory
        self.edition.manifest, self.edition.pages = manifest, loaded.pages
        if isinstance(arena, LiveMemory) and arena.overlapping:
            check = in_thread(check_overlapping, manifest, arena.view, arena.overlapping)
            await uncut(check)
        self.edition.log.planned(len(manifest.layout.layers), manifest)
        self.edition.files.loaded(manifest)
        delivery = self._deliver(manifest, strong=False)
        await in_thread(
            write_side_files, manifest.packaging, manifest.documents, delivery.side_page
        )
        by = VerifiedBy.RANK if self._given_nbytes else VerifiedBy.DIGEST
        for index in range(len(manifest.layout.layers)):
            delivery.announce(arena.view, index, by)
        nbytes, seconds = manifest.layout.payload_nbytes, self.edition.log.last_layer_s()
        paths = [
            PathReport("rank", f"rank {rank}", given, seconds)
            for rank, given in sorted(self._given_nbytes.items())
        ]
        nbytes = self._read_nbytes or nbytes
        paths.insert(0, PathReport(store.step, store.place, nbytes, seconds))
        # The identity was computed from these bytes: `strong` needs no further check.
        self._context.chain.stages += [StageReport(*each) for each in self._stages.report()]
        report = self._report(manifest, paths, VerifiedBy.STRONG if options.strong else by)
        if self._given_nbytes:
            report.moved_bytes = nbytes
        report.defined_by = "" if options.pin or self._expected else store.step
        return await self._commit(delivery, report)

    def _beside(self) -> PullOptions:
        # They lie beside the main weights, which no source may have described.
        return replace(self._options, from_sources=False, stores=(self._store,), bound=False)

    # -- on a thread ------------------------------------------------------------------------------

    def _load(
        self, loop: asyncio.AbstractEventLoop, layout_version: int | None
    ) -> LoadedCheckpoint[Memory | SubsetMemory]:
        """Read the checkpoint into new memory. `out` is checked before. Blocks."""
        options, store, closed = self._options, self._store, self._context.closed
        if options.out is not None:
            Staging(options.out).leave()
        opening = Opening(closed.is_set, loop, options.store_timeout_s)
        with self._stages.clock(store.place, OPEN) as clock:
            opened = store.open(opening)
            clock.drive = getattr(opened.files[0], "device", store.place)
        with closing(opened) as checkpoint:
            # Until its weights are read, a pin proves nothing of it.
            loop.call_soon_threadsafe(self.edition.files.opened, checkpoint)
            loaded = self._load_shared(checkpoint, layout_version) or load_opened(
                checkpoint,
                lambda layout: self._allocate(layout, checkpoint),
                layout_version=layout_version,
                threads=checkpoint.threads,
                in_layer_order=self._early or store.step == OBJECTS,
                on_layer=self._landed,
                progress=self.edition.count,
                cancelled=closed.is_set,
                stages=self._stages,
            )
        ref, expected = loaded.manifest.ref, self._expected
        held = f"{store.place} holds {ref.identity.hex()} ({ref.pin.hex()} with its files)"
        if not ref.pinned_by(options.pin):
            loaded.arena.release()
            raise CheckpointError(
                f"{held}, not {options.pin} as requested", hint="check the pin, and the place"
            )
        signed = expected if options.owners else None  # with its files
        if expected and (expected.identity != ref.identity or (signed and signed.pin != ref.pin)):
            loaded.arena.release()
            name = options.key
            raise CheckpointError(
                f"{held}, not {expected.identity.hex()} as the coordinator lists for {name}",
                hint="NAME@PIN insists on the weights of one or the other",
            )
        return loaded

    def _load_shared(
        self, checkpoint: Checkpoint, layout_version: int | None
    ) -> LoadedCheckpoint[Memory | SubsetMemory] | None:
        """Read the checkpoint together with the other ranks on this host; None: there are none."""
        options, ranks = self._options, self._options.local_ranks
        load_shared = packs.optional("mx.snapshots.shared_reading:load_shared") if ranks else None
        if load_shared is None or self._history.ranks_met or options.strong:
            return None
        self._history.ranks_met = True
        self._log.phase = "waiting for ranks"
        shared = load_shared(
            checkpoint,
            lambda layout: self._allocate(layout, checkpoint),
            ranks,
            where=self._store.place,
            layout_version=layout_version,
            silent_s=options.stall_timeout_s,
            progress=self.edition.count,
            cancelled=self._context.closed.is_set,
            stages=self._stages,
        )
        self._read_nbytes, self._given_nbytes = shared.read_nbytes, shared.given_nbytes
        loaded: LoadedCheckpoint[Memory | SubsetMemory] = shared.loaded
        return loaded

    def _allocate(self, layout: Layout, checkpoint: Checkpoint) -> Memory | SubsetMemory:
        options = self._options
        subset = None if options.selection is None else options.selection.of(layout)
        shift = arena_shift(checkpoint.files, layout) if subset is None else 0
        held = layout if subset is None else subset.layout
        # Also what was allocated when the pull is closed meanwhile is released with the attempt.
        self.edition.arena = arena = options.new_arena(held, shift)
        self._begin_to_write()
        if subset is not None:
            return SubsetMemory(subset, arena)
        if self._early:
            self.edition.early_layout = layout
            self.edition.log.planned(len(layout.layers))
        return arena

    def _landed(self, layer: int) -> None:
        """Deliver a layer that is complete, if nothing but the store describes the weights."""
        arena = self.edition.arena
        if isinstance(arena, LiveMemory) and layer in arena.overlapping:
            return  # not known to be right before all of them are there
        if self.edition.early_layout is not None:
            landed = self.edition.early_layout.layers[layer]
            self.edition.log.layer_ready(landed, VerifiedBy.DIGEST)
