"""`broadcast`: one rank of a process group sends its weights to the memory of the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from mx.api.holding import lend
from mx.api.source import Source
from mx.api.tensors import in_place
from mx.codec import MAX_DOCUMENT_BYTES
from mx.core.digest import DIGEST_BYTES
from mx.core.grid import Layer
from mx.core.manifest import decode
from mx.core.pages import check_page
from mx.core.types import Layout, Manifest, ManifestRef, ModelKey
from mx.errors import (
    ConfigError,
    ManifestError,
    MxError,
    PeerProtocolError,
    PeerVersionError,
)
from mx.memory.in_place import InPlace
from mx.memory.live import LentMemory, LiveMemory, Memory
from mx.text import listed
from mx.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from mx.fleet.process_group import ProcessGroup

_T = TypeVar("_T")

#: The version of the ranks' messages.
PROTOCOL = 1
_NOT_BEGUN = "nothing was broadcast, and no tensor was written to"
_FAILED = "the broadcast failed, and no rank has taken over the weights"
_FORMS = "give the tensors of one model on all ranks; where a source lends them, give that source"


@dataclass(frozen=True, slots=True)
class BroadcastReport:
    """How a broadcast went. All ranks have the same `identity`.

    `identity` is that of the weights, in hexadecimal digits; it is their pin, too, since no files
    travel along. `model` is what the source that was given lists them as, "" if none was. `bytes`
    are those of the tensors, and `layers` the layers: every receiver has compared them with the
    identity. `seconds` are those that the call took on this rank.
    """

    identity: str
    model: str
    bytes: int
    layers: int
    seconds: float

    def __repr__(self) -> str:
        """Return one line: what came, and how long it took."""
        return (
            f"<BroadcastReport {self.model or self.identity[:12]}: {format_bytes(self.bytes)} in "
            f"{format_seconds(self.seconds)}>"
        )


def broadcast(
    tensors: Any,
    group: Any = None,
    src: int = 0,
    *,
    on_layer: Callable[[Layer], None] | None = None,
) -> BroadcastReport:
    """Broadcast one rank's weights to all ranks of a process group, into the memory that they have.

    Every rank of the group calls this, as it calls torch's own collectives. Before a byte moves all
    ranks compare names, shapes, dtypes, strides and ties; then the bytes land in the receivers' own
    tensors, each block is compared with the weights' identity, and in the end all ranks agree that
    all of them have all of it. A failure after the first byte leaves receivers with parts of both
    weights, and its error says so: load them again, as with `mx.pull(NAME, into=tensors)`.

    No other collective may run on the group meanwhile, and nothing may write to the tensors. A rank
    that dies, stops or is interrupted breaks the group: the others get an error within the group's
    timeout.

    Args:
        tensors: A `torch.nn.Module`, a mapping of names to tensors, or what `serve(copy=False)`
            returned for them. Receivers' tensors are filled where they are, and must not be used
            before this returns. On a receiver a source is one that lends its tensors: readers leave
            before the first byte comes, and in the end it lists the new revision, as with
            `Source.changing`. On `src` a source that is listed spares one hashing.
        group: The process group of torch.distributed; None is the default one.
        src: The rank that sends: its rank in the default group, whatever `group` is.
        on_layer: Called on this thread with each layer, in order, once this receiver has verified
            it, or once `src` has sent it. All ranks wait for it.

    Returns:
        What was broadcast.

    Raises:
        ConfigError: A rank's tensors don't fit, or an argument is wrong: no tensor was written to.
        IntegrityError: A rank got other bytes than the identity says: they changed on `src`
            meanwhile, or were damaged.
        PeerLostError: A rank died, or left the broadcast.
        PeerTimeoutError: A rank made no progress within the group's timeout.
        PeerVersionError: Ranks have releases of mx that do not broadcast together.
        MxError: Another error of a rank, or of `Source.changing`. What is found on one rank, all
            ranks raise.
    """
    from mx.fleet.bucketing import Mover  # imports torch
    from mx.fleet.process_group import ProcessGroup

    began_s = time.monotonic()
    ranks = ProcessGroup(group, src)
    with ExitStack() as ends:
        side, error = _attempt(partial(_prepared, ranks, tensors, ends))
        given = side if isinstance(side, _BroadcastWeights) else None
        facts = ranks.agree(error, _NOT_BEGUN, _facts(src, given))
        sizes = _sizes(ranks, facts)
        data = ranks.broadcast(given.data if given else None, sum(sizes[1:]) + 2 * DIGEST_BYTES)

        def fit() -> Mover:
            if given is not None:
                return Mover(ranks, given.manifest, given.pages, given.memory, on_layer)
            manifest, pages = _read(sizes, data)
            return Mover(ranks, manifest, pages, _memory(manifest, side, ends), on_layer)

        mover, error = _attempt(fit)
        kinds = ranks.agree(error, _NOT_BEGUN, [mover.kinds if mover else 0])
        assert mover is not None
        with _telling(gives=given is not None):
            mover.run([kind for (kind,) in kinds])
            error, mover.error = mover.error, None  # its traceback refers to it
            ranks.agree(error, _FAILED)
    layout = mover.manifest.layout
    return BroadcastReport(
        mover.manifest.ref.identity.hex(),
        str(tensors.model) if isinstance(tensors, Source) else "",
        layout.payload_nbytes,
        len(layout.layers),
        time.monotonic() - began_s,
    )


@dataclass
class _BroadcastWeights:
    """The weights of `src`, and `data`: what describes them, as the others get it."""

    manifest: Manifest
    pages: list[bytes]
    memory: Memory
    data: bytes


def _attempt(work: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Return what `work` returns, or the error that it raises, for `ProcessGroup.agree`."""
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001 - all ranks raise it
        return None, error


def _prepared(
    ranks: ProcessGroup, tensors: Any, ends: ExitStack
) -> _BroadcastWeights | Source | InPlace:
    """Return what this rank sends, or where it takes the weights.

    Raises:
        MxError: As `broadcast`.
    """
    if ranks.src not in ranks.ranks:
        known = listed([str(rank) for rank in ranks.ranks])
        raise ConfigError(
            f"`src={ranks.src}` is not in the group, whose ranks are {known}",
            hint="`src` is a rank of the default group",
        )
    if ranks.rank == ranks.src:
        return _given(ranks, tensors, ends)
    if isinstance(tensors, Source):
        tensors.lending()
        return tensors
    with _in_words():
        fills = in_place(tensors)
    ends.callback(ranks.after_all, fills.release)
    return fills


def _given(ranks: ProcessGroup, tensors: Any, ends: ExitStack) -> _BroadcastWeights:
    if isinstance(tensors, Source):
        lending = tensors.lending()
        held = lending.held
        if not lending.lends:
            raise ConfigError(
                f"{held.key} is not listed at the moment: {lending.why or 'it changes'}",
                hint="broadcast it after `changing()` has listed what is in memory",
            )
    else:
        with _in_words():
            held = lend(tensors, ModelKey("mx.broadcast"))
        ends.callback(ranks.after_all, held.release)
    memory = held.arena
    if isinstance(memory, LentMemory) and not isinstance(memory, LiveMemory):
        raise ConfigError(f"{held.key} is in other processes, too", hint="pull it first")
    ref, documents = held.manifest.ref, held.manifest.documents
    pages = [held.pages.get(layer.index) for layer in held.manifest.layout.layers]
    whole = [page for page in pages if page is not None]
    if len(whole) < len(pages):
        raise ConfigError(f"{held.key} was not hashed here", hint="give its tensors")
    data = [ref.identity, ref.layout, documents[ref.identity], documents[ref.layout], *whole]
    return _BroadcastWeights(held.manifest, whole, memory, b"".join(data))


def _facts(src: object, given: _BroadcastWeights | None) -> list[int]:
    """Return what a rank tells the others first. Every release tells as many numbers."""
    sizes = [0, 0, 0, 0]
    if given is not None:
        ref = given.manifest.ref
        pages_nbytes = sum(map(len, given.pages))
        sizes = [ref.layout_version, ref.sizes[0], ref.sizes[1], pages_nbytes]
    return [PROTOCOL, src if isinstance(src, int) else -1, *sizes]


def _sizes(ranks: ProcessGroup, facts: Sequence[Sequence[int]]) -> list[int]:
    """Return the layout version, and the sizes of the identity, the layout and the pages, from what
    all ranks have told. All ranks raise the same error, if any."""
    versions, srcs = (
        dict(zip(ranks.ranks, (each[n] for each in facts), strict=True)) for n in range(2)
    )
    if set(versions.values()) != {PROTOCOL}:
        raise PeerVersionError(f"releases of mx that broadcast differently, by rank: {versions}")
    if len(set(srcs.values())) > 1:
        raise ConfigError(f"ranks name different `src`, by rank: {srcs}")
    sizes = list(facts[ranks.ranks.index(ranks.src)][2:])
    if not all(0 < nbytes <= MAX_DOCUMENT_BYTES for nbytes in sizes[1:3]) or not (
        0 <= sizes[3] <= MAX_DOCUMENT_BYTES
    ):
        raise PeerProtocolError(
            f"rank {ranks.src} describes its weights in {sum(sizes[1:])} bytes: more than "
            f"{format_bytes(MAX_DOCUMENT_BYTES)} for one of three documents, or none"
        )
    return sizes


def _read(sizes: Sequence[int], data: bytes) -> tuple[Manifest, list[bytes]]:
    """Return the manifest and the pages that `src` has sent. Raises ManifestError, DigestError."""
    ends = list(accumulate([DIGEST_BYTES, DIGEST_BYTES, *sizes[1:]]))
    identity, layout, *documents, digests = (data[begin:end] for begin, end in pairwise([0, *ends]))
    ref = ManifestRef(identity, layout, b"", (sizes[1], sizes[2], 0), sizes[0])
    manifest = decode(ref, dict(zip((identity, layout), documents, strict=True)))
    counts = [DIGEST_BYTES * count for count in manifest.grid.layer_blocks]
    if sum(counts) != len(digests):
        raise ManifestError("the block digests are not those of the layout")
    pages = [digests[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
    for layer, page in enumerate(pages):
        check_page(manifest, layer, page)
    return manifest, pages


def _memory(manifest: Manifest, side: object, ends: ExitStack) -> Memory:
    """Return this rank's memory of the weights, which is not used elsewhere.

    Raises:
        ConfigError: The tensors don't fit; the error has all differences.
        MxError: As `Source.changing`.
    """
    if isinstance(side, InPlace):
        with _in_words(_FORMS):
            return side.arena(manifest.layout)
    assert isinstance(side, Source)
    differences = _differences(side.manifest.layout, manifest.layout)
    if differences:
        raise ConfigError(f"{side.model} does not fit: {'; '.join(differences)}", hint=_FORMS)
    ends.enter_context(side.changing())
    memory = side.lending().held.arena
    assert isinstance(memory, LiveMemory)
    moved = memory.changed()
    if moved:
        raise ConfigError(moved, hint="`changing()` lists them where they are; broadcast then")
    return memory


def _differences(ours: Layout, theirs: Layout) -> list[str]:
    """Return in what the tensors of two layouts differ."""
    here, there = (
        {t.name: (t.dtype, list(t.shape), list(t.stride)) for t in layout.tensors}
        | {a.name: (f"view of {a.target}", a.dtype, list(a.shape)) for a in layout.aliases}
        for layout in (ours, theirs)
    )
    missing, extra = sorted(there.keys() - here.keys()), sorted(here.keys() - there.keys())
    found = [f"missing here: {listed(missing)}"] if missing else []
    found += [f"not in the model: {listed(extra)}"] if extra else []
    found += [
        f"{name} is {here[name]} here, {there[name]} in the model"
        for name in sorted(here.keys() & there.keys())
        if here[name] != there[name]
    ]
    if not found and ours != theirs:
        found = ["its layout is another one (of another version, or with other views)"]
    return found


@contextmanager
def _in_words(hint: str = "") -> Iterator[None]:
    """Translate errors about tensors into the arguments of `broadcast`."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("`into`", "`tensors`", 1)
        hint = hint or error.hint.replace(", or serve a copy with `copy=True`", "")
        raise ConfigError(message.replace(", and nothing was written", ""), hint=hint) from error


@contextmanager
def _telling(*, gives: bool) -> Iterator[None]:
    """Have errors say what is in this rank's tensors."""
    try:
        yield
    except MxError as error:
        left = (
            "this rank's tensors are as they were, and those of the others spoiled"
            if gives
            else "this rank's tensors hold parts of both weights: load them again, as with "
            "mx.pull(NAME, into=tensors) from a source of them"
        )
        error.hint = "; ".join(filter(None, [error.hint, left]))
        raise
