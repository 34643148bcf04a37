"""The nouns of mx: models, tensors, layers, layouts, manifests, tables. All immutable.

Offsets are in *layer space*: a layer's tensors in execution order, each aligned to
`TENSOR_ALIGNMENT_BYTES`; the padding between them is neither sent nor hashed. An *arena* is the
layer spaces of a whole model one after the other, each aligned to `LAYER_ALIGNMENT_BYTES`. The
layout alone decides a layer's place in an arena, so that a contiguous source describes all places
by one base address.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from mx.core.digest import document_digest, pin_of
from mx.core.grid import ChunkGrid, Layer
from mx.core.layout_rules import RULES, newest
from mx.core.topology import Place
from mx.units import align_up, count, format_bytes

TENSOR_ALIGNMENT_BYTES = 256
LAYER_ALIGNMENT_BYTES = 4096

#: The most characters of a model's name, of its revision and of its variant.
NAME_CHARS = 256

#: The most that a source says of its folder (`mx.core.notes`).
MAX_NOTES_BYTES = 16 * 1024

#: The variant that is meant where none is named and there is one of this name.
CHECKPOINT = "checkpoint"

#: Bits per element of each safetensors dtype (safetensors 0.8). Those below 8 travel as bytes.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class ModelKey(NamedTuple):
    """The key of a registered manifest: a name, a revision and one variant of them.

    `variant` is a plain word or the canonical text of an `mx.core.variant.ProcessingKey`.
    """

    name: str
    revision: str = "main"
    variant: str = CHECKPOINT

    def __str__(self) -> str:
        text = self.name if self.revision == "main" else f"{self.name}:{self.revision}"
        return text if self.variant == CHECKPOINT else f"{text}[{self.variant}]"


class Tensor(NamedTuple):
    """A tensor's place. `offset` is in its layer's space, `shape` and `stride` in elements.

    A tensor is stored, hashed and moved in storage order. `stride` is () for row-major order, else
    that of a dense tensor with its dimensions in another order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int
    offset: int
    nbytes: int
    stride: tuple[int, ...] = ()


class Alias(NamedTuple):
    """A tensor without bytes of its own: a strided view of another tensor's bytes.

    `offset_bytes` counts from the target's first byte; `stride` is in elements.
    """

    name: str
    target: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    stride: tuple[int, ...]


#: The name of each tensor, the dtypes, shapes and strides that there are, and the index into these
#: of each tensor: there are many tensors, and few such kinds.
Forms = tuple[Sequence[str], Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]], Sequence[int]]


class Layout:
    """Layers in execution order, and each tensor's place in them.

    `mx.core.layout` builds layouts and validates them. `tensors` are ordered by (layer, offset).
    The constructor also takes a function that makes them, and calls it once, on the first access:
    to make 50,000 objects takes longer than everything else that a pull does before its first
    read. `version` is the layout version by whose rules it is planned, None for the newest.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        tensors: Sequence[Tensor] | Callable[[], Sequence[Tensor]],
        aliases: Sequence[Alias] = (),
        version: int | None = None,
        forms: Forms | None = None,
    ) -> None:
        if forms is not None:
            self.forms = forms
        self.version = newest() if version is None else version
        self.layers: tuple[Layer, ...] = tuple(layers)
        self._tensors = tensors
        self.aliases: tuple[Alias, ...] = tuple(aliases)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, ordered by (layer, offset)."""
        # Several threads may come here at once: each finds the function or what it returned.
        made = self._tensors
        if callable(made):
            made = tuple(made())
            self._tensors = made  # releases what the function refers to
        return tuple(made)

    @cached_property
    def forms(self) -> Forms:
        """The names and forms of the tensors, in their order, for which `tensors` need not be."""
        kinds = [(tensor.dtype, tensor.shape, tensor.stride) for tensor in self.tensors]
        index_of = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
        return [t.name for t in self.tensors], [*index_of], [index_of[kind] for kind in kinds]

    @cached_property
    def arena_nbytes(self) -> int:
        """The size of an arena that holds every layer."""
        if not self.layers:
            return 0
        last = self.layers[-1]
        return last.arena_offset + align_up(last.nbytes, LAYER_ALIGNMENT_BYTES)

    @cached_property
    def payload_nbytes(self) -> int:
        """The bytes of tensor data, without padding: the bytes that a pull moves."""
        return sum(self.layer_nbytes)

    @cached_property
    def layer_nbytes(self) -> Sequence[int]:
        """The same of each layer."""
        found = []
        for layer in self.layers:
            found.append(sum(map(itemgetter(1), layer.extents)))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return (self.version, self.layers, self.tensors, self.aliases) == (
            other.version,
            other.layers,
            other.tensors,
            other.aliases,
        )

    __hash__ = None  # type: ignore[assignment]


class PackagedFile(NamedTuple):
    """One safetensors file as `--out` writes it: tensors by name, in file order.

    `path` is relative, with forward slashes, and never leaves the folder. `metadata` is the
    header's `__metadata__`, None where the file had none.
    """

    path: str
    metadata: dict[str, str] | None
    tensors: tuple[str, ...]


class SideFile(NamedTuple):
    """A JSON, text or tokenizer file that travels along; its bytes are a document of its own.
    `newer` ones are of a kind that the first release with companions lets travel."""

    path: str
    nbytes: int
    digest: bytes
    newer: bool = False


class Companion(NamedTuple):
    """A further tensor file of a checkpoint, beside the main weights: a variant of its own, with
    this identity and, for the file's header, this packaging."""

    path: str
    nbytes: int
    identity: bytes
    packaging: bytes

    @property
    def pin(self) -> str:
        """The pin of the file, in hexadecimal."""
        return pin_of(self.identity, self.packaging).hex()


class Packaging(NamedTuple):
    """The files of a checkpoint; none if the source has none. `files` hold the main weights."""

    files: tuple[PackagedFile, ...] = ()
    side_files: tuple[SideFile, ...] = ()
    companions: tuple[Companion, ...] = ()

    @property
    def tensor_files(self) -> list[str]:
        """The paths of all tensor files."""
        return [*(file.path for file in self.files), *(each.path for each in self.companions)]


@dataclass(frozen=True)
class ManifestRef:
    """What names a manifest: its documents by digest (blake3, 32 bytes) and size.

    `identity` is both the model's identity and the digest of the identity document. `packaging` is
    b"" for weights without files. `sizes` are those of the identity, the layout and the packaging
    document, 0 for the last if there is none. `layout_version` is the one that the layout document
    names.
    """

    identity: bytes
    layout: bytes
    packaging: bytes
    sizes: tuple[int, int, int]
    layout_version: int = field(default_factory=newest)

    @property
    def documents(self) -> list[tuple[bytes, int]]:
        """The documents as (digest, nbytes): identity, layout, and packaging if there is one."""
        digests = (self.identity, self.layout, self.packaging)
        return [each for each in zip(digests, self.sizes, strict=True) if each[0]]

    @property
    def content(self) -> bytes:
        """Which weights in which layout: what a process says that its memory holds, 64 bytes."""
        return self.identity + self.layout

    @property
    def scattered_content(self) -> bytes:
        """As `content`, for memory that is laid out otherwise: a reader that attaches to it by
        mistake finds that it is not what the layout says."""
        return self.identity + document_digest(b"rows of " + self.layout)

    def same_weights(self, other: ManifestRef) -> bool:
        """Return True if both are of the same weights, in the same layout. Their files may
        differ."""
        return self.content == other.content

    @property
    def pin(self) -> bytes:
        """The pin of the weights together with their files."""
        return pin_of(self.identity, self.packaging)

    def with_files_of(self, other: ManifestRef) -> ManifestRef:
        """Return this manifest with the files of another one of the same weights."""
        sizes = (self.sizes[0], self.sizes[1], other.sizes[2])
        return replace(self, packaging=other.packaging, sizes=sizes)

    def pinned_by(self, pin: str) -> bool:
        """Return True if `pin`, hexadecimal digits, begins the identity or the pin with files."""
        pin = pin.lower()
        return self.identity.hex().startswith(pin) or self.pin.hex().startswith(pin)

    def weights_alone(self, pin: str) -> bool:
        """Return True if a pin, hexadecimal digits, says nothing of files: it begins the identity,
        or there are no files."""
        return not self.packaging or self.identity.hex().startswith(pin.lower())


@dataclass(frozen=True)
class Manifest:
    """The immutable description of one variant.

    `roots` are the roots of the tensors' hash trees, in the order of `layout.tensors`. `documents`
    maps digests to documents. `vouch` is what the name's owner says of it (`mx.core.vouching`), b""
    if that is not known; `notes` is what a source says of its folder (`mx.core.notes`).
    """

    ref: ManifestRef
    layout: Layout
    packaging: Packaging
    roots: tuple[bytes, ...]
    documents: dict[bytes, bytes]
    vouch: bytes = field(default=b"", compare=False)
    notes: bytes = field(default=b"", compare=False, repr=False)

    def __repr__(self) -> str:
        """One line: what it describes, and its pin."""
        layout = self.layout
        return (
            f"<Manifest: {count(len(layout.tensors), 'tensor')} in "
            f"{count(len(layout.layers), 'layer')}, {format_bytes(layout.payload_nbytes)}, "
            f"pin {self.ref.pin.hex()[:16]}>"
        )

    @cached_property
    def grid(self) -> ChunkGrid:
        """The chunks of the layout."""
        rules = RULES[self.layout.version]
        return ChunkGrid(self.layout.layers, rules.chunk_nbytes(self.layout.payload_nbytes))


@dataclass(frozen=True, slots=True)
class Region:
    """One piece of registered memory. `base` is its address in the source's process.

    `device` is "cpu" or "cuda:UUID". `layers` is a half-open range of layer indices whose layer
    spaces lie in the region one after the other as in an arena, from offset 0; None means that the
    table's rows describe the region.
    """

    index: int
    device: str
    base: int
    nbytes: int
    layers: tuple[int, int] | None = None


#: The bytes of a row in the document of a table's rows.
ROW_BYTES = 32


class TableRow(NamedTuple):
    """An extent of scattered memory: layer-space range -> (region, offset in it)."""

    layer: int
    offset: int
    nbytes: int
    region: int
    region_offset: int


@dataclass(frozen=True)
class AddressTable:
    """The extents of layers that a source holds, and their places.

    `held` are the half-open ranges of complete layers, ascending. A contiguous source has no rows.
    `row_count` is the number of rows, which are a document of their own (`mx.wire.rows`), and
    `rows_digest` that one's digest. `frozen`: readers on the GPU that rows describe may attach to
    its memory. `layer_count` is the number of the model's layers where rows describe the regions,
    else 0. `payload_nbytes` is the number of the model's bytes, of which regions span more; 0: the
    source's release does not say it.
    """

    layout_digest: bytes
    regions: tuple[Region, ...]
    rows: tuple[TableRow, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    layer_count: int = 0
    payload_nbytes: int = 0
    row_count: int = 0
    rows_digest: bytes = b""
    frozen: bool = False

    @property
    def documents(self) -> list[tuple[bytes, int]]:
        """The document of its rows as (digest, nbytes), if there are any."""
        return [(self.rows_digest, self.row_count * ROW_BYTES)] if self.row_count else []

    @property
    def nbytes(self) -> int:
        """The bytes of the model; of an older release's contiguous regions those, with padding."""
        return self.payload_nbytes or sum(region.nbytes for region in self.regions)

    @property
    def scattered(self) -> bool:
        """True if rows say where layers are."""
        return any(region.layers is None for region in self.regions)


class SourceRole(enum.Enum):
    """An origin holds every layer; a relay holds the layers that it has received so far."""

    ORIGIN = "origin"
    RELAY = "relay"


class SourceState(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True)
class SourceRecord:
    """One registered source: everything about it that is public.

    `endpoint` is the HOST:PORT of its Peer service, `transports` the names of the transports that
    expose it. `source_id` is a UUID that the registrant chose. `pin_only` is the coordinator's: the
    name stands for other weights, and readers find this source by its pin. `requests_port` is the
    port of the endpoint's host at which the process takes an engine's requests; 0: at none.
    `commitment` and `statement` are those of a holder of the name key (`mx.core.ownership`), b"" of
    others; `by_owner` is the coordinator's: the commitment is that of the name's owner, and proved.
    With a `certificate` a lender key was, which the owner has certified (`mx.lenderkey`).
    `variant_fields` is the document of a processing key that is shortened (`mx.core.variant`).
    `vouch` is what the name's owner says of the weights (`mx.core.vouching`): of listed ones b"".
    `notes` is what the source says of its folder (`mx.core.notes`).
    """

    source_id: str
    model: ModelKey
    ref: ManifestRef
    endpoint: str
    place: Place
    generation: int
    table: AddressTable
    transports: tuple[str, ...]
    role: SourceRole = SourceRole.ORIGIN
    state: SourceState = SourceState.SERVING
    pin_only: bool = False
    requests_port: int = 0
    commitment: bytes = b""
    statement: bytes = field(default=b"", repr=False)
    by_owner: bool = False
    variant_fields: str = ""
    certificate: bytes = field(default=b"", repr=False)
    vouch: bytes = field(default=b"", repr=False)
    notes: bytes = field(default=b"", repr=False)

    @property
    def own_commitment(self) -> bytes:
        """The commitment that it has proved to hold the name key of, b"" for none."""
        return b"" if self.certificate or self.role is SourceRole.RELAY else self.commitment

    @property
    def key(self) -> str:
        """Its id and endpoint. A process elsewhere that claims the same id has another key, so that
        what it does is not blamed on this source."""
        return f"{self.source_id}@{self.endpoint}"

    @property
    def requests(self) -> str:
        """The HOST:PORT at which its process takes an engine's requests; "": at none."""
        host = self.endpoint.rpartition(":")[0]
        return f"{host}:{self.requests_port}" if self.requests_port else ""

    @property
    def documents(self) -> list[tuple[bytes, int]]:
        """The documents that describe it as (digest, nbytes): its manifest's, and its rows."""
        return [*self.ref.documents, *self.table.documents]

    @property
    def content(self) -> bytes:
        """What its process says that its memory holds."""
        return self.ref.scattered_content if self.table.scattered else self.ref.content

    @property
    def layer_count(self) -> int:
        """The number of layers of its model; 0 if it does not say."""
        spans = (region.layers for region in self.table.regions if region.layers)
        return self.table.layer_count or sum(end - begin for begin, end in spans)

    @property
    def whole(self) -> bool:
        """True if it holds every layer."""
        held = sum(end - begin for begin, end in self.table.held)
        return self.role is SourceRole.ORIGIN or held >= self.layer_count > 0


def cover(sources: Iterable[SourceRecord], own: Iterable[tuple[int, int]] = ()) -> bool:
    """Return True if sources of one variant hold every layer of it, together with one's own."""
    held, layers = list(own), 0
    for source in sources:
        if source.whole:
            return True
        held += source.table.held
        layers = max(layers, source.layer_count)
    reached = 0
    for begin, end in sorted(held):
        if begin > reached:
            return False
        reached = max(reached, end)
    return reached >= layers > 0


class Intent(NamedTuple):
    """What a source registers for, beside being listed.

    `replaces` is the revision that it updates, which has to be the newest; "" for none. With
    `keeps_pin` it was listed before: if its name does not stand for its weights by now, readers
    find it by its pin. `receipt` is what the coordinator gave for the source's model, or for
    `replaces`, in an earlier life; b"" for none. With `publishes` it is to be what its name means
    now, whatever that has meant before. `published_s` is what a coordinator has said of when the
    owner has published it (`mx.core.registry.RegisteredSource`); 0.0 if none has.
    """

    replaces: str = ""
    keeps_pin: bool = False
    receipt: bytes = b""
    publishes: bool = False
    published_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Registration:
    """A source that asks to be listed.

    `secret`, 16 to 64 bytes, authenticates later calls about the source.
    """

    record: SourceRecord
    secret: bytes = field(repr=False)
    intent: Intent = field(default_factory=Intent)
