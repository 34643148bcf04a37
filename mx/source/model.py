"""A model in memory: its bytes in a sealed arena, its manifest and its key."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mx import config
from mx.contexts import Undo
from mx.core import manifest as manifests
from mx.core.digest import document_digest
from mx.core.extents import ExtentMap
from mx.core.pages import Pages
from mx.core.topology import Place
from mx.core.types import (
    ROW_BYTES,
    AddressTable,
    Alias,
    Manifest,
    ModelKey,
    Packaging,
    Region,
    SourceRecord,
    SourceRole,
    SourceState,
)
from mx.core.variant import companion_path, companion_variant, document_of
from mx.errors import ConfigError
from mx.memory.arena import MemfdArena
from mx.memory.arrays import Array
from mx.memory.collector import paused
from mx.memory.describe import DescribedTensors
from mx.memory.device import DeviceArena
from mx.memory.live import LentMemory, LiveMemory, Memory, Tensors
from mx.storage.disk_file import Stamp
from mx.storage.hub_blobs import check_blobs
from mx.storage.landing import ArenaDigests
from mx.storage.load import destination, load_opened
from mx.storage.osfile import read_error
from mx.storage.reader import fill_from_tensors, hash_in_place
from mx.storage.safetensors import Checkpoint, open_checkpoint
from mx.storage.side_files import read_side_files
from mx.transport import DeviceView, ExposedRegion, ScatteredView, View
from mx.wire.rows import encode_rows

if TYPE_CHECKING:
    from mx.memory.pinned import PinnedArena

#: In place of a device: host memory that CUDA's driver makes.
PINNED = "pinned"


@dataclass(eq=False)
class SourceModel:
    """A model that a source serves.

    Its memory is a sealed arena, or live memory that is lent. The server releases it when no
    exposure is left, unless it is `borrowed`: then its owner does.
    """

    key: ModelKey
    manifest: Manifest
    arena: Memory | LentMemory
    #: The block digests of the layers that are known.
    pages: Pages
    #: The shortcut digests of all blocks, layer after layer; b"" if they are not known.
    shortcuts: bytes = b""
    role: SourceRole = SourceRole.ORIGIN
    borrowed: bool = False
    generation: int = 1
    source_id: str = field(default_factory=lambda: str(uuid.uuid4()))
    #: The half-open ranges of layers that are complete and verified; None: all.
    layers: Sequence[tuple[int, int]] | None = None
    #: True while the arena is being filled. Readers may not attach to it then.
    growing: bool = False
    #: Whether readers on the same GPU may attach to live memory. Its owner waits for them.
    frozen: bool = False
    #: The stamps of the files that the weights were read from (`mx.storage.disk_file`); () if they
    #: were not read from files, or those may have changed meanwhile.
    stamps: tuple[Stamp, ...] = ()
    #: What the name's owner said of it when it was registered last; b"": what the manifest has.
    vouch: bytes = b""
    #: The checkpoint's further tensor files, each a model of its own.
    companions: tuple[SourceModel, ...] = ()
    _rows: dict[bytes, bytes] = field(default_factory=dict, repr=False)

    @property
    def takes_name(self) -> bool:
        """True if its name is to stand for it. What a relay has, and a companion, is bound to none:
        it is found by its pin."""
        return self.role is not SourceRole.RELAY and not self.is_companion

    @property
    def is_companion(self) -> bool:
        """True if it is a further tensor file of a checkpoint."""
        return bool(companion_path(self.key.variant))

    @property
    def content(self) -> bytes:
        """What the memory holds, as `SourceRecord.content`."""
        ref = self.manifest.ref
        return ref.scattered_content if self.scattered else ref.content

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self.arena.release()

    def release_all(self) -> None:
        """Release its memory and that of its companions, none of which is served. Idempotent."""
        for each in (*self.companions, self):
            each.release()

    @property
    def live(self) -> bool:
        """True if the memory is an engine's, which may change."""
        return isinstance(self.arena, LentMemory)

    @property
    def scattered(self) -> bool:
        """True if the memory is not laid out as the manifest says."""
        return self.live

    @paused()
    def places(self) -> ExtentMap:
        """Return where the manifest's bytes are. For many tensors this takes a while."""
        if isinstance(self.arena, LentMemory):
            return self.arena.extents
        return ExtentMap.of_arena(self.manifest.layout)

    @paused()
    def find_rows(self) -> None:
        """Make the document of the table's rows, if the memory is not laid out as the manifest
        says: `record` and `documents` have it from then on. For many tensors this takes a while."""
        if self.scattered and not self._rows:
            data = encode_rows(self.places().rows)
            self._rows = {document_digest(data): data}

    @property
    def documents(self) -> Mapping[bytes, bytes]:
        """The documents by digest: the manifest's, the side files, and the rows that were found."""
        return self.manifest.documents | self._rows

    @property
    def device(self) -> str:
        """The device that holds the bytes: "cpu" or "cuda:UUID"."""
        if isinstance(self.arena, LentMemory):
            return self.arena.device
        view = self.arena.view
        return view.device if isinstance(view, DeviceView) else "cpu"

    def view(self) -> View:
        """Return the memory as an arena of the manifest's layout."""
        return self.arena.view

    def regions(self) -> list[ExposedRegion]:
        """Return the memory to expose, read-only; with its memfd if readers may attach to it.

        They may not if the memory is not what a reader's own arena would be.
        """
        view = self.view()
        if not isinstance(view, DeviceView):
            view = view.toreadonly()
        if isinstance(view, ScatteredView):
            return [ExposedRegion(0, view, 0, self.device)]
        memfd = None if self.growing else self.arena.memfd
        return [ExposedRegion(0, view, self.arena.address, self.device, memfd)]

    def record(
        self, endpoint: str, place: Place, transports: Sequence[str], state: SourceState
    ) -> SourceRecord:
        """Return the record under which the model is registered, without the rows of its table
        (`places`).

        Args:
            endpoint: The HOST:PORT that others dial.
            place: The process's place, with the GPU of `device`.
            transports: The names of the transports that expose it.
            state: The source's state.
        """
        layers = len(self.manifest.layout.layers)
        nbytes = self.arena.nbytes if isinstance(self.arena, LentMemory) else len(self.arena.view)
        contiguous = None if self.scattered else (0, layers)
        return SourceRecord(
            source_id=self.source_id,
            model=self.key,
            ref=self.manifest.ref,
            endpoint=endpoint,
            place=replace(place, device=self.device),
            generation=self.generation,
            table=AddressTable(
                layout_digest=self.manifest.ref.layout,
                regions=(Region(0, self.device, self.arena.address, nbytes, contiguous),),
                held=((0, layers),) if self.layers is None else tuple(self.layers),
                layer_count=layers if self.scattered else 0,
                payload_nbytes=self.manifest.layout.payload_nbytes,
                row_count=sum(map(len, self._rows.values())) // ROW_BYTES,
                rows_digest=next((digest for digest, rows in self._rows.items() if rows), b""),
                frozen=self.frozen,
            ),
            transports=tuple(transports),
            variant_fields=document_of(self.key.variant),
            role=self.role,
            state=state,
            vouch=self.vouch or self.manifest.vouch,
            notes=self.manifest.notes,
        )


def _new_arena(nbytes: int, key: ModelKey, device: str) -> MemfdArena | PinnedArena | DeviceArena:
    if device == PINNED:
        from mx.memory.pinned import PinnedArena  # and CUDA with it

        return PinnedArena(nbytes)
    if device == "cpu":
        return MemfdArena(nbytes, name=str(key))
    return DeviceArena(nbytes, device)


def hold_checkpoint(
    path: Path,
    key: ModelKey,
    *,
    layout_version: int | None = None,
    device: str = "cpu",
    shortcuts: bool = False,
    threads: int,
    follow: Collection[Path] = (),
    weights: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SourceModel:
    """Read a checkpoint into a sealed arena, and each of its companions into one of its own.

    Args:
        path: The checkpoint: a file or a folder.
        key: The key to serve it under.
        layout_version: As for `plan_layout`.
        device: "cpu", `PINNED` or a GPU.
        shortcuts: Whether to compute the shortcut digests too.
        threads: The number of threads that read and hash.
        follow: Folders that links of side files may lead to.
        weights: Patterns of the paths of copies of the main weights that travel, too.
        progress: Called with (bytes read, bytes in all), from those threads.
        cancelled: Polled; if it returns True, the load stops with an error.

    Returns:
        The model, whose arena the caller owns, and those of its companions.

    Raises:
        MxError: As `open_checkpoint`, `load_opened` and `DeviceArena`.
    """
    companions: list[SourceModel] = []

    def read_companion(path: str, companion: Checkpoint) -> Manifest:
        variant = companion_variant(key.variant, path)
        companions.append(hold_opened(companion, key._replace(variant=variant)))
        return companions[-1].manifest

    def hold_opened(checkpoint: Checkpoint, key: ModelKey) -> SourceModel:
        loaded = load_opened(
            checkpoint,
            lambda layout: _new_arena(layout.arena_nbytes, key, device),
            layout_version=layout_version,
            shortcuts=shortcuts,
            threads=threads,
            progress=None if companion_path(key.variant) else progress,
            cancelled=cancelled,
            read_companion=read_companion,
        )
        with Undo(loaded.arena.release):
            loaded.arena.seal()
        return SourceModel(
            key,
            loaded.manifest,
            loaded.arena,
            loaded.pages,
            loaded.shortcuts,
            stamps=loaded.stamps,
        )

    try:
        checkpoint = open_checkpoint(path, follow, weights)
        check_blobs(checkpoint.hub, config.state_folder(), cancelled)
        held = hold_opened(checkpoint, key)
    except BaseException:
        for each in companions:
            each.release()
        raise
    held.companions = tuple(companions)
    return held


def hold_tensors(
    specs: Sequence[manifests.TensorSpec],
    aliases: Sequence[Alias],
    tensors: Mapping[str, memoryview],
    key: ModelKey,
    *,
    files: Path | None = None,
    layout_version: int | None = None,
    device: str = "cpu",
    shortcuts: bool = False,
) -> SourceModel:
    """Copy tensors that are in memory into a sealed arena: later changes of the originals do not
    affect it.

    Args:
        specs: The tensors' names, dtypes and shapes.
        aliases: Views of them.
        tensors: The bytes of each tensor, in storage order, read until this returns.
        key: The key to serve them under.
        files: A folder whose side files travel along; None: no files do.
        layout_version: As for `plan_layout`.
        device: "cpu", `PINNED` or a GPU.
        shortcuts: Whether to compute the shortcut digests too.

    Returns:
        The model, whose arena the caller owns.

    Raises:
        MxError: As `plan_layout`, as the arena's constructor, and as `read_side_files`.
    """
    packaging, documents = packaged(files)
    layout = manifests.plan_layout(specs, aliases, layout_version)
    arena = _new_arena(layout.arena_nbytes, key, device)
    with Undo(arena.release):
        with destination(arena, layout) as there:
            filled = fill_from_tensors(
                tensors,
                layout,
                there.view,
                memfd=there.memfd,
                shortcuts=shortcuts,
                on_layer=there.on_layer,
            )
        arena.seal()
        manifest = manifests.encode(layout, packaging, filled.roots, documents)
    pages = Pages.whole(manifest, filled.pages)
    return SourceModel(key, manifest, arena, pages, filled.shortcuts)


def lend_tensors(
    described: DescribedTensors,
    arrays: Mapping[str, Array],
    tensors: Tensors,
    key: ModelKey,
    *,
    files: Path | None = None,
    layout_version: int | None = None,
    frozen: bool = False,
    cancelled: Callable[[], bool] = lambda: False,
) -> SourceModel:
    """Hash tensors where they are, and return them as a model to lend. Nothing is copied.

    Args:
        described: The tensors.
        arrays: All of them by name, those included that share others' memory.
        tensors: Returns them as they are at the moment.
        key: The key to serve them under.
        files: A folder whose side files travel along; None: no files do.
        layout_version: As for `plan_layout`.
        frozen: Whether readers may attach to them.
        cancelled: Polled; if it returns True, hashing stops with an error.

    Raises:
        ConfigError: They are frozen, and in host memory.
        MxError: As `plan_layout`, and as `read_side_files`.
    """
    packaging, documents = packaged(files)
    layout = manifests.plan_layout(described.specs, described.aliases, layout_version)
    memory = LiveMemory(layout, arrays, tensors, f"it is lent as {key}")
    with Undo(memory.release):
        if frozen and memory.device == "cpu":
            raise ConfigError(
                "only tensors in GPU memory can be attached to", hint="leave out `frozen`"
            )
        memory.wait_for_owner()
        filled = hash_in_place(layout, memory.view, memory.hasher, cancelled=cancelled)
        manifest = manifests.encode(layout, packaging, filled.roots, documents)
    held = _lent(key, manifest, memory, filled)
    held.frozen = frozen
    return held


def packaged(folder: Path | None) -> tuple[Packaging, dict[bytes, bytes]]:
    """Return the side files of a folder, without tensor files, and their bytes by digest."""
    if folder is None:
        return Packaging(), {}
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", hint="`files` is the folder with the model's config.json"
        )
    try:
        found, documents, _ = read_side_files(folder)
    except OSError as error:
        raise read_error(error, folder) from error
    return Packaging(side_files=found), documents


def _lent(
    key: ModelKey, manifest: Manifest, memory: LiveMemory, filled: ArenaDigests
) -> SourceModel:
    memory.rest()  # it may be lent for days
    pages = Pages.whole(manifest, filled.pages)
    return SourceModel(key, manifest, memory, pages, filled.shortcuts)


def hashed_again(
    held: SourceModel,
    names: Collection[str] | None,
    cancelled: Callable[[], bool] = lambda: False,
) -> SourceModel:
    """Hash live memory that its owner has written to, and return what it holds now, as a new
    source of the next generation. Blocks.

    Args:
        held: What it held before. No reader reads it.
        names: The tensors that may have changed; None: all. All are hashed, too, if a tensor is
            elsewhere by now.
        cancelled: Polled; if it returns True, hashing stops with an error.

    Returns:
        The model. Its memory is the same object, also where tensors are elsewhere now.

    Raises:
        ConfigError: A tensor can't be lent any more, or a pull fills it. Then nothing has changed.
        ClosedError: It was cancelled.
    """
    memory, layout, packaging = held.arena, held.manifest.layout, held.manifest.packaging
    assert isinstance(memory, LentMemory)
    if not isinstance(memory, LiveMemory):
        manifest, known = memory.manifest_again(cancelled)
        return SourceModel(held.key, manifest, memory, known, generation=held.generation + 1)
    only: set[str] | None = None
    memory.claim_again()
    if memory.changed():
        memory.renew(layout)
    elif (
        names is not None and not held.pages.missing and (held.shortcuts or memory.device != "cpu")
    ):
        only = memory.sharing(names)
    before = None
    if only is not None:
        roots = dict(zip((t.name for t in layout.tensors), held.manifest.roots, strict=True))
        pages = [held.pages.get(layer) or b"" for layer in range(len(layout.layers))]
        before = ArenaDigests(roots, pages, held.shortcuts)
    memory.wait_for_owner()
    filled = hash_in_place(
        layout, memory.view, memory.hasher, only=only, before=before, cancelled=cancelled
    )
    documents = held.manifest.documents
    sides = {side.digest for side in packaging.side_files}
    side_documents = {digest: data for digest, data in documents.items() if digest in sides}
    manifest = manifests.encode(layout, packaging, filled.roots, side_documents)
    found = _lent(held.key, manifest, memory, filled)
    found.role, found.borrowed, found.frozen = held.role, held.borrowed, held.frozen
    found.generation = held.generation + 1
    return found
