"""The whole model of a trainer's parts: its manifest is made of their digests, and of the blocks
that lie in several parts, which are read and hashed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from mx.core import manifest as manifests
from mx.core.digest import DIGEST_BYTES, block_digest, tensor_root
from mx.core.extents import ExtentMap
from mx.core.grid import BLOCK_BYTES, block_count
from mx.core.layout import TensorSpec, contiguous_strides, plan_layout
from mx.core.pages import Pages
from mx.core.types import Alias, Layout, Manifest, Packaging
from mx.errors import MxError
from mx.memory.live import LentMemory
from mx.trainers.pieces import PartSpan, TensorForm, edges, forms_of, spans_of
from mx.trainers.reading import PartsReader, gathered
from mx.trainers.session import PartsMap, PartsSession
from mx.transport import Piece, Read, ScatteredView

#: How many bytes of blocks that lie in several parts are read at a time.
_EDGE_BYTES = 64 << 20


def specs_of(
    tensors: Mapping[str, TensorForm], ties: Mapping[str, str]
) -> tuple[list[TensorSpec], list[Alias]]:
    """Return the tensors and aliases of the whole model, as `plan_layout` takes them."""
    specs = [TensorSpec(name, form.dtype, form.shape) for name, form in tensors.items()]
    aliases = [
        Alias(name, target, dtype, shape, 0, contiguous_strides(shape))
        for name, target in ties.items()
        for dtype, shape in (tensors[target],)
    ]
    return specs, aliases


class DescribedWhole:
    """A whole model: its layout, and where the bytes of each tensor are."""

    def __init__(self, reader: PartsReader, layout_version: int | None) -> None:
        """
        Args:
            reader: Has described the parts.
            layout_version: As for `plan_layout`.

        Raises:
            ManifestError: They do not fit together.
        """
        parts = reader.parts
        tensors, ties = forms_of([each.document for each in parts])
        self.layout: Layout = plan_layout(*specs_of(tensors, ties), layout_version)
        sizes = {name: form.nbytes for name, form in tensors.items()}
        self.spans: dict[str, list[PartSpan]] = spans_of(sizes, [each.pieces for each in parts])
        self.map = PartsMap(self.layout, self.spans, [each.manifest.layout for each in parts])


async def manifest_of(
    whole: DescribedWhole, reader: PartsReader, packaging: Packaging, sides: Mapping[bytes, bytes]
) -> tuple[Manifest, Pages]:
    """Return the manifest of the whole model, and the digests of its blocks.

    Args:
        whole: The model.
        reader: Reads the parts; its pages are asked for, and blocks in several parts are read.
        packaging: The files that travel along.
        sides: Their bytes by digest.

    Raises:
        MxError: A part does not answer, or has changed.
    """
    pages = await gathered(map(reader.pages, range(len(reader.parts))))
    digests = [
        _digests(each.manifest, page) for each, page in zip(reader.parts, pages, strict=True)
    ]
    layout, found = whole.layout, dict[str, list[bytes]]()
    missing: list[tuple[str, int, int, int]] = []  # (tensor, block, place in the arena, bytes)
    for tensor in layout.tensors:
        spans = whole.spans[tensor.name]
        own = found[tensor.name] = [b""] * block_count(tensor.nbytes)
        for begin, end, part, index, offset in spans:
            first = -(-begin // BLOCK_BYTES)
            last = block_count(end) if end == tensor.nbytes else end // BLOCK_BYTES
            at = (offset + first * BLOCK_BYTES - begin) // BLOCK_BYTES
            aligned = not (begin - offset) % BLOCK_BYTES
            if aligned and first < last:
                own[first:last] = digests[part][index][at : at + last - first]
        base = layout.layers[tensor.layer].arena_offset + tensor.offset
        for block in edges(spans, tensor.nbytes):
            place = block * BLOCK_BYTES
            nbytes = min(BLOCK_BYTES, tensor.nbytes - place)
            missing.append((tensor.name, block, base + place, nbytes))
    if missing:
        session = PartsSession(whole.map, await reader.open(), lambda: lambda _: True)
        read: list[tuple[str, int, int, int]] = []
        for each in missing:
            read.append(each)
            if len(read) * BLOCK_BYTES >= _EDGE_BYTES or each is missing[-1]:
                for (name, block, *_), digest in zip(read, await _read(session, read), strict=True):
                    found[name][block] = digest
                read.clear()
    roots = {
        tensor.name: tensor_root(tensor.nbytes, b"".join(found[tensor.name]))
        for tensor in layout.tensors
    }
    manifest = manifests.encode(layout, packaging, roots, dict(sides))
    by_layer: list[list[bytes]] = [[] for _ in layout.layers]
    for tensor in layout.tensors:
        by_layer[tensor.layer] += found[tensor.name]
    return manifest, Pages.whole(manifest, [b"".join(each) for each in by_layer])


def _digests(manifest: Manifest, pages: Pages) -> list[list[bytes]]:
    """Return the digests of the blocks of each tensor of a part."""
    found: list[list[bytes]] = []
    for layer in manifest.layout.layers:
        page, at = pages.get(layer.index) or b"", 0
        for _, nbytes in layer.extents:
            end = at + DIGEST_BYTES * block_count(nbytes)
            found.append([page[i : i + DIGEST_BYTES] for i in range(at, end, DIGEST_BYTES)])
            at = end
    return found


async def _read(session: PartsSession, blocks: Sequence[tuple[str, int, int, int]]) -> list[bytes]:
    """Read blocks, and return their digests."""
    room = [bytearray(nbytes) for *_, nbytes in blocks]
    loop = asyncio.get_running_loop()
    sinks = [_AwaitedRead(loop) for _ in blocks]
    session.read(
        [
            Read(f"{name}, block {block}", [Piece(0, place, memoryview(each))], sink)
            for (name, block, place, _), each, sink in zip(blocks, room, sinks, strict=True)
        ]
    )
    ended = await asyncio.gather(*(each.ended for each in sinks), return_exceptions=True)
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return [block_digest(memoryview(each)) for each in room]


class _AwaitedRead:
    """The sink of a read that a task waits for."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ended: asyncio.Future[None] = loop.create_future()

    def landed(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        self._loop.call_soon_threadsafe(self._end, None)

    def failed(self, error: MxError) -> None:
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: MxError | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class WholeMemory(LentMemory):
    """The memory of a whole model, which is in its parts: this process has no view of it."""

    is_here = False

    def __init__(
        self, layout: Layout, again: Callable[[Callable[[], bool]], tuple[Manifest, Pages]]
    ) -> None:
        """
        Args:
            layout: The model's.
            again: As `manifest_again`.
        """
        self._view = ScatteredView.over((), (), layout.arena_nbytes)
        self._extents = ExtentMap.of_arena(layout)
        self._again = again

    @property
    def view(self) -> ScatteredView:
        return self._view

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def address(self) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        return len(self._view)

    @property
    def extents(self) -> ExtentMap:
        return self._extents

    def manifest_again(self, cancelled: Callable[[], bool]) -> tuple[Manifest, Pages]:
        return self._again(cancelled)
