"""Gets a model's side files (configuration, tokenizer) into memory, beside the pull of its weights
and only when they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mx import trace
from mx.core.reasons import reason_of
from mx.core.types import Manifest, Packaging, SourceRecord
from mx.errors import ClosedError, LocalError, MxError, another
from mx.fetching.events import EditionReadiness
from mx.fetching.opening import stored_files
from mx.fetching.options import PullOptions
from mx.fetching.report import LeftSource
from mx.fetching.resolver import retry_until_found
from mx.runtime import in_thread, uncut, unexpected
from mx.tasks import end_tasks
from mx.wire.client import LocatedModel
from mx.wire.documents import WritePage
from mx.wire.locate import Locator, write_side_files

if TYPE_CHECKING:
    from mx.storage.safetensors import Checkpoint


class DocumentCollector:
    """Collects documents that come in pages, and in whole or in part several times."""

    def __init__(self) -> None:
        self._parts: dict[bytes, bytearray] = {}

    def write(self, digest: bytes, offset: int, data: bytes) -> None:
        """Take the bytes of a document, in order; at offset 0 it begins anew."""
        if offset == 0:
            self._parts[digest] = bytearray()
        self._parts[digest] += data

    def take(self) -> dict[bytes, bytes]:
        """Return the documents by digest, and forget them."""
        found = {}
        while self._parts:  # one after the other: together they may be large
            digest, part = self._parts.popitem()
            found[digest] = bytes(part)
        return found


async def write_files(
    options: PullOptions,
    locator: Locator,
    located: LocatedModel,
    manifest: Manifest,
    write: WritePage,
    left: list[LeftSource],
    on_wait: Callable[[], None] = lambda: None,
) -> str:
    """Pass a model's side files to `write`, page by page: from a source that has the same ones,
    known or listed by now, or that comes within `wait_s`; else from a store.

    Args:
        options: The pull's options.
        locator: Looks for sources.
        located: The model, and its sources when it was found.
        manifest: The model's manifest.
        write: Takes the pages, on a thread; at offset 0 a document begins anew.
        left: Gets the sources that did not serve them.
        on_wait: Called when a wait for a source begins.

    Returns:
        The endpoint of the source that served them; the store's place; or "" if they were with the
        manifest.

    Raises:
        NoSourceError, DigestError, CoordinatorError: No source served all of them.
        LocalError: `write` raised it.
    """
    known: Sequence[SourceRecord] = located.sources

    def refused(endpoint: str, error: MxError) -> None:
        left.append(LeftSource(endpoint, reason_of(error)))

    async def attempt() -> str:
        nonlocal known
        try:
            return await locator.write_side_files(manifest, known, write, refused)
        except LocalError:
            raise
        except MxError as error:
            tried = {source.key for source in known}
            try:
                known = await locator.again(located)
            except MxError:
                raise error from None  # it says more
            if tried.issuperset(source.key for source in known):
                raise
        return await locator.write_side_files(manifest, known, write, refused)

    packaging = manifest.packaging
    nbytes = sum(side.nbytes for side in packaging.side_files)
    try:
        with trace.span("pull.files", nbytes=nbytes):
            return await retry_until_found(attempt, options.wait_s, on_wait)
    except LocalError:
        raise
    except MxError:
        same = await stored_files(options, packaging)
        if same is None:
            raise
        place, documents = same
        await uncut(in_thread(write_side_files, packaging, documents, write))
        return place


class _KnownFiles(NamedTuple):
    """What is known of the files: which there are, and those that are here; and where to get the
    others (None: all are here)."""

    packaging: Packaging
    documents: Mapping[bytes, bytes]
    manifest: Manifest | None = None
    located: LocatedModel | None = None


class SideFiles:
    """One edition's side files in memory, at most 256 MiB; on the loop. `close` it.

    They are got by the first `get`, once for all that ask, and kept until `close`.
    """

    def __init__(self, options: PullOptions, ready: EditionReadiness) -> None:
        """
        Args:
            options: The pull's options.
            ready: What is known of the edition: whether the caller knows which weights these are.
        """
        self.source = ""  # that served the files: its endpoint, or a store's place
        self.left: list[LeftSource] = []
        self._options = options
        self._ready = ready
        self._known: _KnownFiles | None = None
        self._changed = asyncio.Event()
        self._files: dict[str, bytes] | None = None
        self._task: asyncio.Task[dict[str, bytes]] | None = None
        self._over: MxError | None = None

    # -- what the pull finds ----------------------------------------------------------------------

    def described(self, located: LocatedModel, manifest: Manifest) -> None:
        """Take the manifest that a source or the coordinator gave."""
        self._know(_KnownFiles(manifest.packaging, manifest.documents, manifest, located))

    def loaded(self, manifest: Manifest) -> None:
        """Take the manifest of a checkpoint on disk, with its files."""
        self._know(_KnownFiles(manifest.packaging, manifest.documents, manifest))

    def opened(self, checkpoint: Checkpoint) -> None:
        """Take the files of a checkpoint on disk, before its weights are read. Only these say
        which weights they are: with a pin, or if the caller knows already, this does nothing."""
        if "@" not in self._options.name and self._ready.told is None:
            wanted = self._options.wanted_files(checkpoint.packaging)
            self._know(_KnownFiles(wanted, checkpoint.side_documents))

    def _know(self, known: _KnownFiles) -> None:
        self._known = known
        self._changed.set()

    # -- what the caller asks for -----------------------------------------------------------------

    @property
    def here(self) -> dict[str, bytes] | None:
        """The files by path, None if they have not arrived, or not been asked for; on any
        thread."""
        files = self._files
        return None if files is None else dict(files)

    async def get(self) -> dict[str, bytes]:
        """Return the files by path, as soon as they are known and here. Each call after a failed
        one tries again.

        Raises:
            NoSourceError, DigestError, CoordinatorError: No source served all of them.
            MxError: The error with which the edition has ended (`end`).
        """
        if (here := self.here) is not None:
            return here
        if self._over is not None:
            raise self._refusal()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="mx-files")
            self._task.add_done_callback(self._ended)
        task = self._task
        try:
            return dict(await asyncio.shield(task))
        except asyncio.CancelledError:
            if not task.cancelled():
                raise  # it is the caller who was cancelled
            raise self._refusal() from None
        except Exception as error:  # noqa: BLE001 - raised, once for each that asks
            raise another(unexpected(error)) from None

    def _refusal(self) -> MxError:
        return another(self._over or ClosedError("the pull was closed"))

    def _ended(self, task: asyncio.Task[dict[str, bytes]]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()  # retrieved: those that asked may have stopped waiting

    async def _run(self) -> dict[str, bytes]:
        while True:
            while self._known is None:
                self._changed.clear()
                await self._changed.wait()
            known = self._known
            try:
                documents = await self._documents(known)
            except MxError:
                if known is self._known:
                    raise
            else:
                if known is self._known:
                    break  # else more is known by now
        if known.manifest is not None:
            known.manifest.documents.update(documents)  # this pull's readers may want them
            self._ready.told = known.manifest.ref.identity
        self._files = {side.path: documents[side.digest] for side in known.packaging.side_files}
        return self._files

    async def _documents(self, known: _KnownFiles) -> Mapping[bytes, bytes]:
        digests = {side.digest for side in known.packaging.side_files}
        if known.manifest is None or known.located is None or digests <= known.documents.keys():
            return {digest: known.documents[digest] for digest in digests}
        collector, options = DocumentCollector(), self._options
        async with Locator(options) as locator:
            self.source = await write_files(
                options, locator, known.located, known.manifest, collector.write, self.left
            )
        return collector.take()

    def end(self, why: MxError) -> None:
        """Stop: who asks for files that are not here gets this error. Idempotent."""
        self._over = self._over or why
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Stop, wait until nothing is fetched any more, and let go of the files. Idempotent."""
        task = self._task
        self.end(ClosedError("the pull was closed"))
        self._files = self._known = None
        await end_tasks(task)
