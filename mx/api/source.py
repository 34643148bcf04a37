"""What `serve` returns: a model that this process serves."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import runtime
from mx.api.closing import Closable, Step
from mx.api.common import (
    checked_port,
)
from mx.api.holding import check_names, hold, taken_in
from mx.core.notes import Notes, decode
from mx.core.pages import Pages
from mx.core.reference import pinned_name
from mx.core.types import Manifest, ModelKey
from mx.core.variant import membership
from mx.errors import ClosedError, ConfigError, MxError
from mx.memory.live import LiveMemory
from mx.runtime import uncut
from mx.source.changes import MemoryChange
from mx.source.handover import Handover
from mx.source.lending import Lending
from mx.source.model import SourceModel
from mx.source.server import SourceServer, SourceStats
from mx.storage.side_files import resolved_folders
from mx.tasks import Latch, require_other_thread
from mx.transport import View, host_view
from mx.units import format_bytes

if TYPE_CHECKING:
    from mx.coordinator.daemon import Coordinator

log = logging.getLogger(__name__)


class Source(Closable):
    """A model that this process serves; `serve` makes it.

    Close it, or use it as a context manager, blocking or async: one that is dropped is closed, with
    a ResourceWarning. `endpoint` is the HOST:PORT that readers connect to, `coordinator_address`
    the coordinator that it is registered with.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        server: SourceServer,
        held: SourceModel,
        coordinator_address: str,
        embedded: Coordinator | None,
        *,
        updatable: bool = False,
    ) -> None:
        """Take over a server that serves `held`.

        Args:
            loop: The loop, acquired for this object.
            server: The server, which this object closes.
            held: The model that it serves.
            coordinator_address: HOST:PORT; empty if it is registered with none.
            embedded: The coordinator in this process, if `serve` started one.
            updatable: True allows `update`.
        """
        self._server = server
        self._held = held
        self._handover = Handover(server)
        self._embedded = embedded
        self._updatable = updatable
        self._closing = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.RLock()
        self._kept: Closable | None = None
        self.coordinator_address = coordinator_address
        self.endpoint = server.endpoint
        super().__init__(loop)

    def __repr__(self) -> str:
        """Return one line: the model, its size and where it is served."""
        state = "closed" if self._closed.is_set() else f"at {self.endpoint}"
        size = format_bytes(self.manifest.layout.payload_nbytes)
        return f"<Source {self.model}: {size}, {state}>"

    @property
    def _current(self) -> SourceModel:
        """What is served, or lent, or was before it was withdrawn."""
        lending = self._server.lending
        return self._held if lending is None else lending.held

    @property
    def model(self) -> ModelKey:
        """The name, revision and variant that are served."""
        return self._current.key

    @property
    def manifest(self) -> Manifest:
        """The manifest of the weights."""
        return self._current.manifest

    @property
    def pages(self) -> Pages:
        """The digests of the model's blocks."""
        return self._current.pages

    def buffer(self) -> memoryview:
        """Return the weights as the manifest's arena lays them out.

        Returns:
            A read-only view that keeps the memory alive.

        Raises:
            LocalError: The weights are in a GPU, or lent where they are.
        """
        return host_view(self._current.arena.view)

    def memory(self) -> View:
        """Return the weights as the manifest's arena lays them out, wherever they are.

        Returns:
            A view that keeps the memory alive. Lent tensors are in several places: it must not be
            written to.

        Raises:
            ClosedError: The weights were lent, and the source was closed.
        """
        arena = self._current.arena
        if isinstance(arena, LiveMemory) and arena.released:
            raise ClosedError(f"the source of {self.model} was closed")
        return arena.view

    @property
    def memfd(self) -> int | None:
        """The memory file that readers of this host attach to; None if there is none."""
        return self._current.arena.memfd

    @property
    def identity_hex(self) -> str:
        """The identity of the weights, in hexadecimal."""
        return self._current.manifest.ref.identity.hex()

    @property
    def pinned(self) -> str:
        """NAME@PIN with all digits: these weights, and their files if there are any."""
        return pinned_name(self.model, self.manifest.ref)

    @property
    def embedded(self) -> bool:
        """True if the coordinator runs in this process."""
        return self._embedded is not None

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator that runs in this process, if `serve` started one."""
        return self._embedded

    @property
    def notes(self) -> Notes:
        """What is said of the folder that the weights were read from: which files it leaves out."""
        return decode(self._current.manifest.notes)

    def stats(self) -> SourceStats:
        """Return what the source serves at the moment, and what it has served."""
        return self._server.stats()

    def accept_requests(self, port: int) -> None:
        """Have routers send requests to this process (`mx.Router`), until the source is closed.

        Returns at once.

        Args:
            port: The port of the endpoint's host where the engine takes requests; 0: it takes none
                any more.

        Raises:
            ConfigError: It is not a port.
            ClosedError: The source was closed.
        """
        self._require_own()
        port = checked_port(port)
        if self._closing.is_set():
            raise ClosedError(f"the source of {self.model} was closed")
        self._loop.submit(self._server.accept_requests(port))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the source is closed.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            False if `timeout_s` passed first.
        """
        return self._closed.wait(timeout_s)

    def drain(self, grace_s: float = 10.0) -> bool:
        """Stop granting reads and wait for the current readers, before `close`.

        Args:
            grace_s: Seconds to wait at most.

        Returns:
            True if all readers finished in time.
        """
        return self._loop.run(self._server.drain(grace_s))

    def update(
        self,
        what: str | Path | Any,
        *,
        grace_s: float = 10.0,
        follow: Collection[str | Path] = (),
        weights: Collection[str] = (),
        on_progress: Callable[[int, int], None] | None = None,
    ) -> ModelKey:
        """Serve new weights as a new revision in place of the current ones.

        Blocks until the old weights are out of memory. Weights that are identical change nothing.

        The new weights get memory of their own, so that no memory changes while readers use it;
        for a while both are in memory. Once the new weights are registered, NAME means them.
        Readers of the old ones may finish within `grace_s` seconds and are then cut off: such a
        pull goes on from other sources of the old weights, or fails. No reader gets a mixture of
        the two. Memory that readers attached to keeps the old weights.

        The ranks of a bundle (`variant` with `tp`, `pp` or `ep`) update in step: each calls this
        once per update, even if its own weights stay the same, and gets the same revision. NAME
        means the previous one until all have registered. A rank that others are missing for returns
        and goes on serving the previous weights, too, until they have come.

        Args:
            what: The new weights, as for `serve`.
            grace_s: Seconds that readers of the old weights have to finish.
            follow: As for `serve`.
            weights: As for `serve`.
            on_progress: As for `serve`.

        Returns:
            The new key, which `model` is from then on.

        Raises:
            BindingError: The name belongs to another name key; or another holder of the key has
                updated it meanwhile, to other weights.
            ConfigError: This source holds a pull.
            ClosedError: The source was closed.
            MxError: An error that `serve` raises. After any error the old weights stay served. An
                exception of a signal's handler leaves the old ones or the new ones served.
        """
        self._require_own()
        with self._lock:
            if not self._updatable or self._held.borrowed:
                raise ConfigError(
                    f"{self.model} was pulled: only the source that registered it can update it"
                )
            if self._held.live:
                raise ConfigError(
                    f"{self.model} is lent where it is", hint="write to it inside `changing()`"
                )
            if self._closed.is_set():
                raise ClosedError(f"the source of {self.model} was closed")
            old = self._held

            def take(stopped: Callable[[], bool]) -> SourceModel:
                return hold(
                    what,
                    old.key,
                    old.device,
                    layout_version=old.manifest.layout.version,
                    follow=resolved_folders(follow),
                    weights=weights,
                    on_progress=on_progress,
                    cancelled=stopped,
                )

            self._loop.run(self._update(old, take, grace_s))
            return self.model

    async def _update(
        self, old: SourceModel, take: Callable[[Callable[[], bool]], SourceModel], grace_s: float
    ) -> None:
        held = await taken_in(take, self._closing.is_set)
        same = held.manifest.ref.identity == old.manifest.ref.identity
        if same and membership(old.key.variant).alone:
            held.release_all()
            return
        await self._server.offer_beside(old.source_id, held)
        # To its end: what is published stays, and what is outdated must not stay listed.
        await uncut(self._publish(old, held, grace_s))

    async def _publish(self, old: SourceModel, held: SourceModel, grace_s: float) -> None:
        await self._server.replace(held)
        self._held = held
        await self._handover.hand_over(old, held, grace_s, self._closing.is_set)

    def changing(self, names: Collection[str] | None = None, *, grace_s: float = 0.0) -> Changing:
        """Write to tensors that are lent, inside the `with` block.

        Entering withdraws them: readers may finish within `grace_s` seconds and are then cut off,
        and no reader trusts anything that it reads from then on. It returns once their leases have
        ended, after two seconds at most. Leaving hashes the tensors and lists them again: as a new
        revision that NAME means from then on if this process holds the name's key, as they were if
        nothing has changed. A source that does not hold it lists them only if these weights are
        bound already.

        A pull inside the block may fill the tensors (`into=`). It gives them back before the block
        ends: `close` it, or `release`.

        Whenever leaving does not list them it raises, and `withdrawn` says why: the tensors stay
        withdrawn until another `changing`. If the block raises, that error goes out. Then the
        tensors are listed if nothing has changed, and else stay withdrawn, since they may be half
        written. So they do if `changing` is interrupted, as by Ctrl-C, wherever that is.

        Args:
            names: The tensors that the block writes to; None: any, and all are hashed again.
            grace_s: Seconds that readers have to finish.

        Returns:
            A context manager, for one block.

        Raises:
            ConfigError: This source lends no live memory, a name is not among its tensors, or
                another thread is inside; or, on leaving, a tensor has another shape or dtype than
                before, is gone, or its memory is in use.
            BindingError: Another source bound the name, and none has registered these weights.
            ClosedError: The source was closed.
            LocalError: "In use": readers are attached to frozen tensors, and were so after
                `grace_s`. The tensors stay withdrawn, and must not be written to.
            MxError: The tensors could not be withdrawn from their readers, or not be listed again.
        """

        def lending() -> Lending:
            found = self.lending()
            check_names(found.held.manifest.layout, names)
            return found

        return Changing(self._loop, lending, names, grace_s)

    def lending(self) -> Lending:
        """Return what looks after the tensors that are lent.

        Raises:
            ConfigError: This source lends no live memory.
            ClosedError: It was closed.
        """
        self._require_own()
        lending = self._server.lending
        if lending is None:
            raise ConfigError(
                f"{self.model} is a copy of mx's own: writing to the tensors changes nothing here",
                hint="serve with `copy=False`, or use update()",
            )
        if self._closing.is_set():
            raise ClosedError(f"the source of {self.model} was closed")
        return lending

    @property
    def withdrawn(self) -> str:
        """Why the weights are served to no reader any more; "" while they are: this process has
        written to them, or replaced tensors that were lent."""
        lending = self._server.lending
        return self._server.retirement.withdrawn if lending is None else lending.why

    def close(self) -> None:
        """Deregister, cut the remaining readers and free the memory.

        Idempotent; an interrupted close goes on when it is called again. An update that runs on
        another thread stops waiting for its readers. Where readers are attached to memory that was
        lent with `frozen`, it raises LocalError ("in use") at each call, until they have left.
        """
        self._closing.set()
        with self._lock:
            super().close()
            lending = self._server.lending
            if lending is not None and not self._loop.inherited:
                self._server.retirement.require_let_go(lending.held.key)

    def keep(self, owner: Closable) -> bool:
        """Take over the owner of the memory that is served, to close it at the end.

        Args:
            owner: What owns the memory, such as a pull.

        Returns:
            False if this source is closed already.
        """
        if self._steps is not None:
            return False
        self._kept = owner
        runtime.closed(owner)  # not by itself any more
        return True

    def _label(self) -> str:
        return f"<Source {self.model}>"

    def _closing_steps(self) -> list[Step]:
        embedded = [] if self._embedded is None else [self._awaiting(self._embedded.stop)]
        kept = [] if self._kept is None else [self._kept.close]
        return [
            self._awaiting(self._handover.close),
            self._awaiting(self._server.close),
            *embedded,
            *kept,
            self._closed.set,
        ]

    def forked(self) -> None:
        super().forked()
        self._lock = threading.RLock()
        self._closing, self._closed = threading.Event(), threading.Event()
        self._closing.set()
        self._closed.set()


# -- what `Source.changing` returns ----------------------------------------------------------------

#: How often a wait looks whether the loop still runs: it may stop with the process.
_LOOK_S = 1.0


class Changing(contextlib.AbstractContextManager[None]):
    """One change of lent tensors, made by the thread that is inside; a context manager, once.

    An exception may come at any bytecode here, from a signal. So what enters and leaves is a task
    on the loop, which is told by single calls what becomes of the block, and withdraws the tensors
    if this object is gone before it has left.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        lending: Callable[[], Lending],
        names: Collection[str] | None,
        grace_s: float,
    ) -> None:
        """
        Args:
            loop: The source's loop.
            lending: Returns what looks after the tensors. Raises what entering raises.
            names: The tensors that the block writes to; None: any.
            grace_s: Seconds that readers have to finish.
        """
        self._loop = loop
        self._find = lending
        self._names, self._grace_s = names, grace_s
        self._change: MemoryChange | None = None

    def __enter__(self) -> None:
        """Return once no reader trusts what it reads. Raises as `Source.changing`."""
        if self._change is not None:
            raise ConfigError("a change is made once", hint="call `changing` again")
        require_other_thread(off_loop=True)
        lending = self._find()
        change = MemoryChange(self._names, self._grace_s)
        change.driver = weakref.ref(self, _dropping(self._loop, change))
        self._change = change
        try:
            self._tell(lambda: lending.begin(change))
            self._wait(change.entered)
        except BaseException:  # also an interrupt: then the block never runs
            self._give_up(change)
            raise
        if change.error is not None:
            _raise(change)

    def __exit__(self, kind: object, *_: object) -> None:
        """Return once the tensors are listed again. Raises as `Source.changing`, unless the block
        raised."""
        change, failed = self._change, kind is not None
        if change is None or self._loop.inherited:  # in a forked child nothing is lent
            return
        try:
            self._tell(lambda: change.leave(failed=failed))
            self._wait(change.ended)
        except BaseException:
            self._give_up(change)
            raise
        if failed:  # the block's own error counts; this one was logged
            change.error = None
        elif change.error is not None:
            _raise(change)

    def _give_up(self, change: MemoryChange) -> None:
        """End the change from outside, and wait until that is done."""
        with contextlib.suppress(ClosedError):
            self._tell(change.interrupt)
            self._wait(change.ended)

    def _tell(self, what: Callable[[], None]) -> None:
        try:
            self._loop.loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop has stopped, and so everything was closed
            raise ClosedError("the source was closed") from None

    def _wait(self, latch: Latch) -> None:
        require_other_thread(off_loop=True)
        while not latch.wait(_LOOK_S):
            if self._loop.loop.is_closed():
                raise ClosedError("the source was closed")


def _raise(change: MemoryChange) -> None:
    error: MxError | None = change.error
    change.error = None
    assert error is not None
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame


def _dropping(loop: runtime.LoopThread, change: MemoryChange) -> Callable[[object], None]:
    """Return the callback for when the thread's side was dropped; it is called on any thread."""
    told = weakref.ref(change)

    def dropped(_: object) -> None:
        found = told()
        if found is not None and not found.ended.is_set and not loop.inherited:
            with contextlib.suppress(RuntimeError):  # the loop has stopped
                loop.loop.call_soon_threadsafe(found.wake)

    return dropped
