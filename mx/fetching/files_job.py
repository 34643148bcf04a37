"""A pull of a model's side files alone: no weights, no memory for them, no reader slot. On the
loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from mx.core.progress import Progress
from mx.core.types import Packaging
from mx.errors import ConfigError, LocalError, MxError, NoSourceError, OutputError
from mx.fetching.edition import Edition
from mx.fetching.events import EventLog, changed
from mx.fetching.files import write_files
from mx.fetching.opening import open_store
from mx.fetching.options import PullOptions
from mx.fetching.report import FilesReport, PullReport, VerifiedBy
from mx.fetching.resolver import describe, retry_until_found
from mx.runtime import in_thread, uncut, unexpected
from mx.storage.staged_writer import FilesWriter
from mx.storage.stores import CheckpointStore
from mx.wire.documents import WritePage
from mx.wire.locate import Locator, write_side_files


class FilesJob:
    """One pull of files only; call `run` on the loop. To its caller it is a `Job` without layers.

    With `out` the files go to disk as they come, else into memory, where `files` has them.
    """

    def __init__(self, options: PullOptions, log: EventLog) -> None:
        self.options = options
        self.key = options.key
        self.kept = self.cached_at = ""
        self._log = log
        self.edition = Edition(options, log, log.begin_anew())
        self._done_nbytes = self._total_nbytes = 0

    def progress(self) -> Progress:
        """Return a snapshot, which counts the files' bytes; from any thread."""
        return Progress(self._done_nbytes, self._total_nbytes, phase=self._log.phase)

    async def run(self) -> None:
        """Run to the end; the log gets the report or the error. Raises only if cancelled."""
        try:
            report = await self._pull()
            self._log.phase = "complete"
            self._log.finished(report)
        except BaseException as error:  # callers that wait on the log need any error
            failure = unexpected(error)
            self.edition.end(failure)
            self._log.failed(failure)
            if not isinstance(error, Exception):
                raise

    async def _pull(self) -> PullReport:
        if not self.options.from_sources:
            return await self._from_stores()
        try:
            return await self._from_sources()
        except (LocalError, ConfigError):
            raise
        except MxError:
            # Which weights a store's files belong to, only its weights could prove.
            bound = self.options.pin or self.options.owners or self.edition.log.told
            ready = None if bound or not self.options.stores else self._log.begin_again()
            if ready is None:
                raise
        ended, self.edition = self.edition, Edition(self.options, self._log, ready)
        ended.end(changed())
        return await self._from_stores()

    async def _from_sources(self) -> PullReport:
        async with Locator(self.options) as locator:
            located, manifest = await retry_until_found(
                lambda: describe(locator), self.options.wait_s, self._log.waiting
            )
        self.key, self.edition.manifest = located.model, manifest
        self.edition.log.planned(0, manifest)
        wanted = replace(manifest, packaging=self.options.wanted_files(manifest.packaging))
        self.edition.files.described(located, wanted)
        packaging, left = wanted.packaging, self.edition.files.left
        if not packaging.side_files and self.options.files is None:
            raise NoSourceError(
                f"{self.key} has no files: its sources serve the weights alone",
                hint="serve the checkpoint's folder, or pull the weights without `files_only`",
            )

        async def fetch(write: WritePage) -> str:
            waiting = self._log.waiting
            async with Locator(self.options) as locator:
                return await write_files(
                    self.options, locator, located, wanted, write, left, waiting
                )

        source = await self._get("fetching files", packaging, fetch) or self.edition.files.source
        report = self._report(packaging, source)
        report.identity, report.pin = manifest.ref.identity.hex(), manifest.ref.pin.hex()
        report.left = list(dict.fromkeys(left))
        return report

    async def _from_stores(self) -> PullReport:
        self.edition.log.planned(0)
        for number, store in enumerate(self.options.stores, 1):
            try:
                return await self._from_store(store)
            except OutputError:
                raise
            except MxError:
                if number == len(self.options.stores):
                    raise
        raise ConfigError("there is no store to read")

    async def _from_store(self, store: CheckpointStore) -> PullReport:
        phase = self._log.phase = f"reading {store.step}"
        checkpoint = await open_store(store, self.options)
        await uncut(in_thread(checkpoint.close))  # its small files were read
        packaging = self.options.wanted_files(checkpoint.packaging)
        self.edition.files.opened(checkpoint)
        if not packaging.side_files and self.options.files is None:
            raise ConfigError(
                f"{store.place} has no files beside its weights",
                hint="name the folder that has config.json",
            )

        async def copy(write: WritePage) -> str:
            await uncut(in_thread(write_side_files, packaging, checkpoint.side_documents, write))
            return store.place

        await self._get(phase, packaging, copy)
        return self._report(packaging, store.place)

    async def _get(
        self, phase: str, packaging: Packaging, write_to: Callable[[WritePage], Awaitable[str]]
    ) -> str:
        """Get the files: by `write_to` into `out`, or into memory. Returns what `write_to` does, ""
        if it was not called."""
        self._log.phase = phase
        self._total_nbytes = sum(side.nbytes for side in packaging.side_files)
        if self.options.out is None:
            await self.edition.files.get()
            self._done_nbytes = self._total_nbytes
            return ""
        writer = FilesWriter(self.options.out, packaging)
        done_nbytes: dict[bytes, int] = {}

        def write(digest: bytes, offset: int, data: bytes) -> None:
            writer.write_page(digest, offset, data)
            done_nbytes[digest] = offset + len(data)
            self._done_nbytes = sum(done_nbytes.values())

        try:
            source = await write_to(write)
            self._log.phase = "writing"
            await uncut(in_thread(writer.finish))
        finally:
            await uncut(in_thread(writer.abort))
        self._done_nbytes = self._total_nbytes
        return source

    def _report(self, packaging: Packaging, source: str) -> PullReport:
        stores = self.options.stores if self.options.from_sources else ()
        count = len(packaging.side_files)
        manifest = self.edition.manifest
        return PullReport(
            notes=b"" if manifest is None else manifest.notes,
            model=str(self.key),
            identity="",
            pin="",
            bytes=0,
            seconds=time.monotonic() - self._log.started_s,
            first_layer_s=0.0,
            layers=0,
            verified=VerifiedBy.DIGEST.value,
            fallback=next((each.step for each in stores if each.place == source), None),
            files=FilesReport(count, self._total_nbytes, source),
        )

    async def leave(self) -> None:
        """Do nothing: no other pull reads here."""

    def close(self) -> None:
        """Do nothing: cancelling `run` ends it."""
