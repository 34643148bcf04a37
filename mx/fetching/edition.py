"""What a pull has of one revision: its memory, what is ready in it, its files, and the id by which
others know it.

A pull has one present edition. When another one follows (the model has changed, or what was begun
is given up for a store), the old one ends as a whole: nothing of it can be obtained
from then on, and what its threads still do stays in it. Tensors that the caller has keep their
memory, and their bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mx.errors import ClosedError, MxError, another
from mx.fetching.files import SideFiles
from mx.fetching.report import EditionOf, LayerEvent, VerifiedBy
from mx.runtime import unexpected

if TYPE_CHECKING:
    from mx.core.grid import Layer
    from mx.core.pages import Pages
    from mx.core.selection import Subset
    from mx.core.types import Layout, Manifest
    from mx.fetching.events import EditionReadiness, EventLog
    from mx.fetching.options import PullOptions
    from mx.memory.live import Memory
    from mx.swarm.sharing import Sharing
    from mx.views import TensorView, View


class EditionLog:
    """What one edition's threads record of it: which layers are ready, and how its transfer ends.
    Reported on any thread; `changed`, `lost`, `ended`, `failure` and `causes` change on the loop on
    which it was made."""

    def __init__(self, pull: EventLog, ready: EditionReadiness, edition_of: EditionOf) -> None:
        """
        Args:
            pull: The pull's log.
            ready: The edition's, which the log has begun.
            edition_of: Returns the edition of a ready layer, and is passed on by events.
        """
        self.pull = pull
        self._ready = ready
        self._edition_of = edition_of
        self._loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.lost: dict[int, MxError] = {}  # connections that the transfer gave up
        self.ended = False
        self.failure: MxError | None = None
        self.causes: Sequence[MxError] | None = None  # of a transfer that has run out of sources

    def planned(self, n_layers: int, manifest: Manifest | None = None) -> None:
        """Record how many layers there are, and what describes them.

        Raises:
            IntegrityError: The caller was told of other weights.
        """
        self.pull.planned(self._ready, n_layers, manifest)

    @property
    def told(self) -> bool:
        """Return True if the caller knows which weights these are."""
        return self._ready.told is not None

    def layer_ready(self, layer: Layer, by: VerifiedBy, revision: str = "") -> bool:
        """Record that a layer is ready now, and call the subscribers. Returns True if it is the
        last one. Raises what a callback raises."""
        at_s = time.monotonic() - self.pull.started_s
        event = LayerEvent(
            layer.index, layer.name, layer.nbytes, by.value, at_s, revision, self._edition_of
        )
        return self.pull.layer_ready(self._ready, event, self.raised)

    @property
    def layers_ready(self) -> int:
        return len(self._ready.events)

    def is_ready(self, layer: int) -> bool:
        return layer in self._ready.events

    def first_layer_s(self) -> float:
        """Return when layer 0 was ready, since the start; 0.0 if it is not."""
        event = self._ready.events.get(0)
        return 0.0 if event is None else event.at_s

    def last_layer_s(self) -> float:
        return max((event.at_s for event in self._ready.events.values()), default=0.0)

    # -- the end ----------------------------------------------------------------------------------

    def connection_lost(self, connection: int, error: MxError) -> None:
        self._on_loop(lambda: self.lost.update({connection: error}))

    def complete(self) -> None:
        """End: every layer is ready."""
        self._on_loop(self._end)

    def failed(self, causes: Sequence[MxError]) -> None:
        """End: no connection is left that could finish the transfer."""

        def end() -> None:
            self.causes = causes
            self._end()

        self._on_loop(end)

    def broken(self, error: MxError) -> None:
        """End with this error: the pull can't go on."""
        self._on_loop(lambda: self._end(error))

    def raised(self, error: BaseException) -> None:
        """End with any exception, as an MxError."""
        self.broken(unexpected(error))

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Make an exception in the block the pull's failure, and suppress it: on other threads it
        would be lost, and the pull would wait for ever."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - reported
            self.raised(error)

    def _end(self, error: MxError | None = None) -> None:
        self.failure = self.failure or error
        self.ended = True

    def _on_loop(self, change: Callable[[], object]) -> None:
        def run() -> None:
            change()
            self.changed.set()

        with contextlib.suppress(RuntimeError):  # the loop was closed: the pull is over
            self._loop.call_soon_threadsafe(run)


class _EditionLookup:
    """Gives the edition of a layer's event. It does not keep the edition, nor its memory."""

    def __init__(self, edition: Edition) -> None:
        self.over: MxError | None = None  # why there are none any more
        self._edition = weakref.ref(edition)

    def __call__(self, layer: int) -> Edition:
        edition = self._edition()
        if edition is None:
            raise another(self.over or ClosedError(f"the pull of layer {layer} is gone"))
        return edition


class Edition:
    """One edition of a pull; made and ended on the loop. Its public attributes are None until they
    are known, and may be read on any thread.

    `lock` guards the view: none is made while the memory is sealed.
    """

    def __init__(
        self, options: PullOptions, log: EventLog, ready: EditionReadiness, reader_id: str = ""
    ) -> None:
        """
        Args:
            options: The pull's.
            log: The pull's.
            ready: This edition's part of the log.
            reader_id: The source id by which others know it; "" if they can't read from it.
        """
        self.reader_id = reader_id
        self.manifest: Manifest | None = None
        self.pages: Pages | None = None
        self.arena: Memory | None = None
        self.subset: Subset | None = None  # of a pull of some tensors, with the manifest
        self.early_layout: Layout | None = None  # of what is delivered before there is a manifest
        self.sharing: Sharing | None = None  # its door to a swarm, while it has one
        #: (bytes so far, bytes in total) that were read, shown while no layout is known.
        self.counted = (0, 0)
        self.lock = threading.Lock()
        self._access = _EditionLookup(self)
        self.log = EditionLog(log, ready, self._access)
        self.files = SideFiles(options, ready)
        self._into = options.into
        self._view: View | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of `arena`; None until it is known."""
        if self.subset is not None:
            return self.subset.layout
        return self.early_layout if self.manifest is None else self.manifest.layout

    def page(self, layer: int) -> bytes | None:
        """Return a layer's page; None while it is not known."""
        return None if self.pages is None else self.pages.get(layer)

    def count(self, done: int, total: int) -> None:
        """Record how many bytes were read; from any thread."""
        self.counted = (done, total)

    @property
    def viewed(self) -> bool:
        """True once the caller has a view of the memory."""
        return self._view is not None

    def view(self) -> tuple[Layout, View]:
        """Return the layout of the memory, and all of it.

        Raises:
            RevisionChangedError: Another edition follows this one.
            ClosedError: There is no memory yet, or none any more.
            MxError: The error that ended the pull.
        """
        with self.lock:
            if self._access.over is not None:
                raise another(self._access.over)
            arena, layout = self.arena, self.layout
            if arena is None or layout is None:
                raise ClosedError("the pull has no tensors: it was closed, or has not begun")
            if self._view is None:
                self._view = arena.private_view()
            return layout, self._view

    def tensors(self, layer: int | None = None) -> dict[str, Any]:
        """Return the torch tensors of a layer, and those that are tied to them; None: all.

        Raises:
            ConfigError: torch is not installed.
            MxError: As `view`.
        """
        layout, view = self.view()
        names = {t.name for t in layout.tensors if layer is None or t.layer == layer}
        names |= {alias.name for alias in layout.aliases if alias.target in names}
        if self._into is not None and not isinstance(self._into, memoryview):
            every = [t.name for t in layout.tensors] + [alias.name for alias in layout.aliases]
            return self._into.tensors(name for name in every if name in names)
        from mx.memory.tensors import state_dict

        return state_dict(view, layout, names)

    def views(self, layer: int) -> dict[str, TensorView]:
        """Return the tensors of a layer, and those that are tied to them, as views of the memory.

        Raises:
            MxError: As `view`.
        """
        from mx.memory.arrays import layer_views

        return layer_views(layer, *self.view())

    def unseen(self, work: Callable[[], None]) -> None:
        """Do something to the memory while no view of it is made. Blocks."""
        with self.lock:
            work()

    @property
    def given_back(self) -> bool:
        """True once the tensors of `into` are the caller's alone again."""
        from mx.memory.live import LiveMemory

        return isinstance(self.arena, LiveMemory) and self.arena.released

    # -- the end ----------------------------------------------------------------------------------

    def end(self, why: MxError) -> None:
        """Give nothing of it any more, but this error. On the loop; idempotent."""
        with self.lock:
            self._access.over = self._access.over or why
            self._view = None
        self.files.end(why)

    def release(self) -> None:
        """Free the memory, once nothing reads or writes it any more. Idempotent."""
        if self.arena is not None:
            self.arena.release()
