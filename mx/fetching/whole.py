"""Reads a whole model from a store: by request, or because no source has described it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import closing
from dataclasses import replace

from mx.core.layout_rules import oldest
from mx.core.types import Layout
from mx.errors import CheckpointError, MxError, NotAllowedError
from mx.fetching.attempt import Attempt, Context
from mx.fetching.edition import Edition
from mx.fetching.options import PullOptions
from mx.fetching.report import PathReport, PullReport, VerifiedBy
from mx.memory.live import LiveMemory, Memory
from mx.memory.subset import SubsetMemory
from mx.memory.verify import check_overlapping
from mx.runtime import in_thread, uncut
from mx.storage.load import LoadedCheckpoint, load_opened
from mx.storage.staging import Staging
from mx.storage.stores import OBJECTS, CheckpointStore
from mx.stores import Opening
from mx.wire.locate import Locator, write_side_files

log = logging.getLogger(__name__)


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
        self._expected = context.history.named if options.bound else None
        # What is delivered can't be taken back: a later step, a pin or `out` needs all of it first.
        alone = not (options.pin or self._expected or options.out or options.selection)
        self._early = last and alone and options.device == "cpu"

    async def run(self) -> PullReport:
        """Read, deliver and commit the model.

        Raises:
            CheckpointError: The checkpoint is malformed, or not the pinned or expected one.
            MxError: As `CheckpointStore.open` and `load_opened`, and for `out` as `Staging`.
        """
        options, store = self._options, self._store
        # Uncut: once the pull is closed no thread may write to `into`.
        version = await self._layout_version()
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
        await in_thread(write_side_files, manifest, delivery.side_page)
        for index in range(len(manifest.layout.layers)):
            delivery.announce(arena.view, index, VerifiedBy.DIGEST)
        nbytes, seconds = manifest.layout.payload_nbytes, self.edition.log.last_layer_s()
        path = PathReport(store.step, store.place, nbytes, seconds)
        # The identity was computed from these bytes: `strong` needs no further check.
        by = VerifiedBy.STRONG if options.strong else VerifiedBy.DIGEST
        report = self._report(manifest, [path], by)
        report.defined_by = "" if options.pin or self._expected else store.step
        return await self._commit(delivery, report)

    async def _layout_version(self) -> int | None:
        """Return the layout version of a model that others are to read from here: where no
        coordinator names one, the oldest, which the release before plans too. None for any."""
        options, listed = self._options, self._history.named
        if listed is not None:
            return listed.layout_version
        if not options.hold:
            return None
        if options.coordinator is None:
            return oldest()
        locator = Locator(options)
        try:
            return await locator.layout_version(options.key)
        except NotAllowedError:  # nor could it be registered
            raise
        except MxError as error:  # to pull needs no coordinator; the registration will say it
            log.debug("no layout version is known: %s", error)
            return oldest()
        finally:
            await locator.close()

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
        with closing(store.open(opening)) as checkpoint:
            # Until its weights are read, a pin proves nothing of it.
            loop.call_soon_threadsafe(self.edition.files.opened, checkpoint)
            loaded: LoadedCheckpoint[Memory | SubsetMemory] = load_opened(
                checkpoint,
                self._allocate,
                layout_version=layout_version,
                threads=checkpoint.threads,
                in_layer_order=store.step == OBJECTS,
                on_layer=self._landed,
                progress=self.edition.count,
                cancelled=closed.is_set,
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

    def _allocate(self, layout: Layout) -> Memory | SubsetMemory:
        options = self._options
        subset = None if options.selection is None else options.selection.of(layout)
        # Also what was allocated when the pull is closed meanwhile is released with the attempt.
        self.edition.arena = arena = options.new_arena(layout if subset is None else subset.layout)
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
