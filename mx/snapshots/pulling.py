"""Reads a model from the stores by the digests beside its weights: each layer is ready once it is
there, under a pin too, and ranks on one host each read a part."""

from __future__ import annotations

import functools
import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mx.core import manifest as manifests
from mx.core.pages import Pages
from mx.core.types import Manifest
from mx.errors import ManifestError, MxError, NoSourceError
from mx.fetching.attempt import Context, TransferAttempt
from mx.fetching.edition import Edition
from mx.fetching.opening import layout_version, open_store
from mx.fetching.options import PullOptions
from mx.fetching.prefill import prefilling
from mx.fetching.report import PullReport
from mx.runtime import in_thread, uncut
from mx.snapshots.digests import decode
from mx.snapshots.indexing import kept_digests
from mx.wire.locate import write_side_files

if TYPE_CHECKING:
    from mx.core.types import ManifestRef
    from mx.storage.safetensors import Checkpoint
    from mx.storage.stores import CheckpointStore

log = logging.getLogger(__name__)


class Described(NamedTuple):
    """A model as digests beside its weights describe it. Its pin, or what it is listed as, confirms
    that; else `step` is the store's, which defines what the model is."""

    manifest: Manifest
    pages: Pages
    step: str


async def from_digests(
    context: Context, edition: Edition, listed: ManifestRef | None
) -> FromDigests | None:
    """Return the attempt to read what the first store's digests describe that are the model's; None
    if none are.

    Args:
        context: The pull's.
        edition: What it fills.
        listed: What the coordinator has answered; None if it was not asked.
    """
    found = await described(context.options, listed)
    return None if found is None else FromDigests(context, edition, found)


async def described(options: PullOptions, listed: ManifestRef | None) -> Described | None:
    """Return what the first store's digests describe that are the model's; None if none are.

    Args:
        options: The pull's.
        listed: What the coordinator has answered; None if it was not asked.
    """
    known = bool(options.pin or listed)
    # Without either, a model of which all is read shows layers at once, and what it is in the end.
    if not (known or options.selection or options.local_ranks):
        return None
    expected = options.pin or (listed.identity.hex() if listed else "")
    for store in options.stores:
        try:
            kept = await in_thread(_digests, store, expected)
            if not kept:
                continue
            version = await layout_version(options, listed)
            with closing(await open_store(store, options)) as checkpoint:
                for data in kept:
                    found = await in_thread(_confirmed, data, checkpoint, options, listed, version)
                    if found is not None:
                        return Described(*found, "" if known else store.step)
        except MxError as error:  # as if there were none
            log.info("the digests beside %s are not used: %s", store.place, error)
    return None


def _digests(store: CheckpointStore, expected: str) -> list[bytes]:
    """Return what is known of the weights on a disk."""
    path = getattr(store, "path", None)
    return list(kept_digests(path, expected)) if isinstance(path, Path) else []


def _confirmed(
    data: bytes,
    checkpoint: Checkpoint,
    options: PullOptions,
    listed: ManifestRef | None,
    version: int | None,
) -> tuple[Manifest, Pages] | None:
    """Return what digests describe, with the checkpoint's own files; None if they are not the
    model's. Raises MxError."""
    if checkpoint.companions:  # whose digests a pin covers, too
        return None
    try:
        found, pages = decode(data)
    except ManifestError as error:  # as if there were none
        log.info("digests of %s are not used: %s", checkpoint.root, error)
        return None
    layout = manifests.plan_layout(checkpoint.specs, checkpoint.aliases, version)
    names = [tensor.name for tensor in found.layout.tensors]
    roots = dict(zip(names, found.roots, strict=True))
    if names != [tensor.name for tensor in layout.tensors]:
        return None
    manifest = manifests.encode(layout, checkpoint.packaging, roots, checkpoint.side_documents)
    ref = manifest.ref
    if ref.identity != found.ref.identity or not ref.pinned_by(options.pin):
        return None
    if listed and (listed.identity != ref.identity or (options.owners and listed.pin != ref.pin)):
        return None
    # The layouts are of one order: so are the pages.
    known = Pages(manifest)
    for layer in range(len(layout.layers)):
        if (page := pages.get(layer)) is not None:
            known.put(layer, page)
    return replace(manifest, notes=checkpoint.notes), known


class FromDigests(TransferAttempt):
    """One attempt to read a described model from the stores, one after the other."""

    def __init__(self, context: Context, edition: Edition, found: Described) -> None:
        super().__init__(context, edition)
        self._found = found
        #: Whether a pin, or what the model is listed as, says what it is, and not the store alone.
        self.is_defined = not found.step

    async def run(self) -> PullReport:
        """Read, deliver and commit the model.

        Raises:
            MxError: No store has what is missing.
        """
        options, edition, (manifest, known, step) = self._options, self.edition, self._found
        layers = len(manifest.layout.layers)
        edition.manifest = manifest
        if options.selection is not None:
            edition.subset = await in_thread(options.selection.of, manifest.layout)
        edition.log.planned(layers, manifest)
        edition.files.loaded(manifest)
        delivery = self._deliver(manifest, strong=options.strong)
        if options.strong:
            self._closing.push_async_callback(in_thread, delivery.settle)
        try:
            await in_thread(
                write_side_files, manifest.packaging, manifest.documents, delivery.side_page
            )
            _, transfer = await self._allocate(manifest, delivery, several_connections=False)
            for layer in transfer.pages.missing:
                if (page := known.get(layer)) is not None:
                    transfer.put_page(layer, page)
            transfer.start()
            fill = prefilling(delivery, options.reuse, attachable=False)
            if fill is not None:
                await uncut(in_thread(fill, transfer, transfer.pages, self._context.closed.is_set))
            chain = self._context.chain
            if options.device != "cpu":
                from mx.snapshots.cufile import disk_session

                gpudirect = options.transport_context.setting("gpudirect")
                chain.session = functools.partial(disk_session, options.device, gpudirect)
                if options.local_ranks is not None and not self._history.ranks_met:
                    from mx.snapshots.gpu_ranks import GpuRanks

                    self._history.ranks_met = True
                    ranks = GpuRanks(self._context, transfer, options.local_ranks)
                    self._closing.push_async_callback(in_thread, ranks.close)
                    chain.session = functools.partial(ranks.session, chain.session)
            await chain.complete(manifest, transfer.pages, transfer, edition.log, self._log)
            if edition.log.failure is not None:
                raise edition.log.failure
            if edition.log.causes is not None:
                raise chain.error(NoSourceError(f"no store holds all of {self._history.key}"))
            report = self._report(
                manifest, transfer.paths(), delivery.verified_by, transfer.retries
            )
            report.defined_by = step
            if options.from_sources:
                report.fallback = chain.completed or None
            if self._wanted is not None:
                given_nbytes = sum(path.bytes for path in report.paths if path.given)
                report.moved_bytes = self._wanted.nbytes - given_nbytes
        finally:
            await uncut(self._closing.aclose())
        return await self._commit(delivery, report)

    def _beside(self) -> PullOptions:
        return replace(self._options, from_sources=False, bound=False)
