"""Serves the shards of a trainer's rank as a part of the model, and at the first rank the whole."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from mx import config, namekey, runtime
from mx.api.common import client_of, transports
from mx.api.serving import offer, serve, source_options, start_source
from mx.api.source import Source
from mx.core.pages import Pages
from mx.core.types import CHECKPOINT, Manifest, ModelKey, Packaging, SourceState
from mx.core.variant import ProcessingKey
from mx.errors import ClosedError, ConfigError, NoSourceError
from mx.fetching.options import PullOptions
from mx.fetching.paths import target_place
from mx.runtime import uncut
from mx.source.model import SourceModel, packaged
from mx.text import listed
from mx.trainers.dtensors import has_dtensors, local_shards, rank_of_process
from mx.trainers.pieces import DOCUMENT, PartDocument
from mx.trainers.reading import PartAddress, PartsReader, PartsTicket
from mx.trainers.transport import FACT, NAME, ExposingParts
from mx.trainers.whole import DescribedWhole, WholeMemory, manifest_of
from mx.transport import Transport
from mx.wire.address import tls_of

#: How often the coordinator is asked which parts there are.
_ASK_AGAIN_S = 0.02
#: How long the first rank waits for the others where no `wait_s` says more.
WAIT_S = 60.0


class WholeSource(Source):
    """What the first rank of a trainer serves: the whole model, and its own part."""

    part: Source
    composer: Composer

    @property
    def withdrawn(self) -> str:
        """Why readers get nothing at the moment; "" while they do."""
        return self.part.withdrawn or super().withdrawn

    def changing(self, names: Collection[str] | None = None, *, grace_s: float = 0.0) -> Any:
        """Write to this rank's shards, inside the `with` block.

        All ranks do so once for each version: leaving lists a rank's part as it is, and here waits
        until all have (`wait_s` of `serve_part`), and lists the whole as a new revision. Readers
        get one version or the other.

        Args:
            names: None: any tensor may be written to.
            grace_s: As for `mx.Source.changing`.

        Raises:
            NoSourceError: On leaving: others have not left theirs in time.
            MxError: As `mx.Source.changing`.
        """
        if names is not None:
            raise ConfigError("all shards of a rank change", hint="leave out `names`")
        return PartChange([super().changing(grace_s=grace_s), self.part.changing(grace_s=grace_s)])


class PartChange(contextlib.AbstractContextManager[None]):
    """Changes that are entered together, and left in the other order; a context manager, once."""

    def __init__(self, changes: Sequence[contextlib.AbstractContextManager[None]]) -> None:
        """
        Args:
            changes: The changes.
        """
        self._changes = changes
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            for each in self._changes:
                stack.enter_context(each)
            self._entered = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)


def serve_part(
    what: Any,
    *,
    model: str,
    coordinator: str | None = None,
    files: str | Path | None = None,
    rank: int | None = None,
    ranks: int | None = None,
    wait_s: float | None = None,
    settings: config.Settings | None = None,
    update: bool = False,
    **more: Any,
) -> Source:
    """Lend this rank's shards of a module whose parameters are DTensors, where they are.

    Called by all ranks. The first one waits for the others, and serves the whole model as NAME.
    `Source.changing` changes the shards: see `WholeSource`.

    Args:
        what: The module, or a state dict. It must have its sharded parameters.
        model: NAME or NAME:REVISION.
        coordinator: As for `mx.serve`.
        files: A folder whose configuration and tokenizer files travel with the whole model.
        rank: This process's rank, by default torch.distributed's.
        ranks: How many there are.
        wait_s: How long the first rank waits for the others, at the start and after each change;
            by default a minute, or the time in the settings if that is longer.
        settings: As for `mx.serve`.
        update: As for `mx.serve`.
        more: Other arguments of `mx.serve`.

    Raises:
        ConfigError: A tensor is sharded otherwise than by rows, or this process has no rank.
        NoSourceError: Other ranks do not serve their parts in time.
        MxError: As `mx.serve`.
    """
    if rank is None or ranks is None:
        rank, ranks = rank_of_process()
    settings = settings or config.load()
    shards = local_shards(what)
    document = PartDocument(rank, ranks, shards.tensors, shards.ties)
    with tempfile.TemporaryDirectory(prefix="mx-part-") as folder:
        (Path(folder) / DOCUMENT).write_bytes(document.encode())
        part = serve(
            shards.pieces,
            model=model,
            variant=ProcessingKey(part=(rank, ranks)),
            coordinator=coordinator,
            copy=False,
            files=folder,
            settings=settings,
            update=update,
            **more,
        )
    if rank:
        return part
    try:
        patience_s = max(WAIT_S, settings.wait_s) if wait_s is None else wait_s
        packaging = packaged(None if files is None else Path(files))
        composer = Composer(part, ranks, packaging, settings, patience_s)
        return _serve_whole(composer, update=update)
    except BaseException:
        part.close()
        raise


def served_parts(
    what: Any,
    model: str,
    revision: str,
    variant: str | ProcessingKey,
    coordinator: str | None,
    embed: bool,
    files: str | Path | None,
    wait_s: float | None,
    settings: config.Settings,
    update: bool,
    cancelled: Callable[[], bool],
    copy: bool,
    frozen: bool,
) -> Source | None:
    """Serve a module's parts for `mx.serve`, as `serve_part`; None if it has no DTensors.

    Raises:
        ConfigError: They were to be copied or frozen, or to have a variant.
        MxError: As `serve_part`.
    """
    if not has_dtensors(what):
        return None
    if copy:
        raise ConfigError(
            "its parameters are DTensors, which are lent where they are",
            hint="give `copy=False`, and write to them inside `changing()`",
        )
    if variant or frozen:
        raise ConfigError(
            "its parameters are DTensors, whose variant says which rank's they are",
            hint=f"leave out `{'variant' if variant else 'frozen'}`",
        )
    return serve_part(
        what,
        model=model,
        revision=revision,
        coordinator=coordinator,
        embed=embed,
        files=files,
        wait_s=wait_s,
        settings=settings,
        update=update,
        cancelled=cancelled,
    )


class Composer:
    """Makes the whole model of its parts, again after each change."""

    def __init__(
        self,
        part: Source,
        ranks: int,
        packaging: tuple[Packaging, Mapping[bytes, bytes]],
        settings: config.Settings,
        wait_s: float,
    ) -> None:
        self.part, self._ranks, self._packaging = part, ranks, packaging
        self.settings, self.wait_s = settings, wait_s
        self._layout_version: int | None = None
        self.ticket: PartsTicket
        self.whole: DescribedWhole

    def run(self, cancelled: Callable[[], bool]) -> tuple[Manifest, Pages]:
        """Wait until all parts are there, and return what they are together. Blocks."""
        key = self.part.model
        composing = runtime.submit(lambda: self._compose(key))
        while not futures.wait([composing], 0.1).done:
            if cancelled() and composing.cancel():
                raise ClosedError(f"the source of {key.name} was closed")
        return composing.result()

    async def _compose(self, key: ModelKey) -> tuple[Manifest, Pages]:
        addresses = await self._wait_for_parts(key)
        settings, tls = self.settings, tls_of(self.settings)
        options = settings.fill(
            PullOptions,
            name=key.name,
            tls=tls,
            data_tls=None if settings.data_plaintext else tls,
        )
        place = await runtime.in_thread(target_place, options)
        others = {name: each for name, each in transports().items() if name != NAME}
        async with PartsReader(options, lambda: place, others) as reader:
            await reader.describe(addresses)
            self.whole = DescribedWhole(reader, self._layout_version)
            self._layout_version = self.whole.layout.version
            found = await manifest_of(self.whole, reader, *self._packaging)
        self.ticket = PartsTicket(self.whole.layout.version, tuple(addresses))
        return found

    async def _wait_for_parts(self, key: ModelKey) -> Sequence[PartAddress]:
        until_s = time.monotonic() + self.wait_s
        wanted = [str(ProcessingKey(part=(rank, self._ranks))) for rank in range(self._ranks)]
        async with client_of(self.settings, self.part.coordinator_address) as client:
            while True:
                there: dict[str, PartAddress] = {}
                for each in await client.list_sources(key.name):
                    record = each.record
                    if (
                        record.model.revision == key.revision
                        and record.state is SourceState.SERVING
                        and record.whole
                    ):
                        there.setdefault(record.model.variant, PartAddress.of(record))
                missing = [each for each in wanted if each not in there]
                if not missing:
                    return [there[each] for each in wanted]
                if time.monotonic() > until_s:
                    raise NoSourceError(
                        f"{key.name}:{key.revision} lacks {listed(missing)}",
                        hint="all ranks serve their parts, and leave `changing` once each step",
                    )
                await asyncio.sleep(_ASK_AGAIN_S)


def _serve_whole(composer: Composer, *, update: bool) -> WholeSource:
    part, settings = composer.part, composer.settings
    manifest, pages = composer.run(lambda: False)
    memory = WholeMemory(composer.whole.layout, composer.run)
    key = part.model._replace(variant=CHECKPOINT)
    held = SourceModel(key, manifest, memory, pages)
    address, name_key = part.coordinator_address, namekey.load(settings)
    parts: dict[str, Transport] = {NAME: ExposingParts(lambda: composer.ticket)}

    async def make(loop: runtime.LoopThread) -> WholeSource:
        options = source_options(settings, address, live=True, name_key=name_key)
        context = options.transport_context
        facts = replace(context, facts=(*context.facts, FACT))
        server = await start_source(replace(options, transport_context=facts), parts)
        try:
            await offer(server, held, address, update=update)
            return WholeSource(loop, server, held, address, None)
        except BaseException:
            await uncut(server.close())
            raise

    made = runtime.made(make)
    made.part, made.composer = part, composer
    if not made.keep(part):  # it closes the part in the end
        raise ClosedError(f"the source of {key} was closed")
    return made
