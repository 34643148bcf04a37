"""A second implementation of docs/identity.md, written from that page: slow, obvious, without mx.

It has no checks: what it is given is right.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

MIB = 1_048_576
ROOT_CONTEXT = "mx 2026-11-22 root of a tensor's blocks"
PIN_CONTEXT = "mx 2026-11-22 pin of identity and packaging"

BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8}
BITS |= {"F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32}
BITS |= {"C64": 64, "F64": 64, "I64": 64, "U64": 64}


@dataclass
class Tensor:
    """`data` is what the tensor's bytes are, in storage order; [] for `strides` is row-major."""

    name: str
    dtype: str
    shape: list[int]
    strides: list[int] = field(default_factory=list)
    data: bytes = b""

    @property
    def kind(self) -> list[Any]:
        return [self.dtype, self.shape, *([self.strides] if self.strides else [])]

    @property
    def nbytes(self) -> int:
        return elements(self.shape) * BITS[self.dtype] // 8


@dataclass
class Alias:
    name: str
    holder: str
    dtype: str
    shape: list[int]
    offset: int
    strides: list[int]


@dataclass
class Model:
    """`tensors` and `aliases` are in any order, and any of several tied names may hold the bytes.
    `layers` are the layers and their tensors in layout order, by canonical names: which they are is
    guessed by rules that this implementation does not have. `files` and `side_files` are as in the
    packaging document, but for the tensors' names in place of their indices."""

    tensors: list[Tensor]
    layers: list[tuple[str, list[str]]] = field(default_factory=list)
    aliases: list[Alias] = field(default_factory=list)
    files: list[list[Any]] = field(default_factory=list)
    side_files: list[list[Any]] = field(default_factory=list)

    @property
    def in_layers(self) -> list[list[Tensor]]:
        """The tensors of each layer."""
        named = {tensor.name: tensor for tensor in canonical_holders(self)[0]}
        return [[named[name] for name in names] for _, names in self.layers]


def digest(data: bytes) -> bytes:
    return blake3(data).digest()


def derived_digest(context: str, data: bytes) -> bytes:
    return blake3(data, derive_key_context=context).digest()


def elements(shape: list[int]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    return count


# -- blocks and roots -----------------------------------------------------------------------------


def blocks(data: bytes) -> list[bytes]:
    found = []
    while data:
        found.append(data[:MIB])
        data = data[MIB:]
    return found


def block_digests(data: bytes) -> list[bytes]:
    return [digest(block) for block in blocks(data)]


def root(data: bytes) -> bytes:
    length = len(data).to_bytes(8, "little")
    return derived_digest(ROOT_CONTEXT, length + b"".join(block_digests(data)))


# -- documents ------------------------------------------------------------------------------------


def escape(character: str) -> str:
    short = {
        '"': '\\"',
        "\\": "\\\\",
        "\b": "\\b",
        "\t": "\\t",
        "\n": "\\n",
        "\f": "\\f",
        "\r": "\\r",
    }
    if character in short:
        return short[character]
    return f"\\u00{ord(character):02x}" if ord(character) < 0x20 else character


def write(value: Any) -> str:
    """The one way to write JSON."""
    if value is None:
        return "null"
    if isinstance(value, str):
        return '"' + "".join(escape(character) for character in value) + '"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(write(item) for item in value) + "]"
    assert isinstance(value, dict)
    return "{" + ",".join(write(key) + ":" + write(value[key]) for key in sorted(value)) + "}"


def row_major(shape: list[int]) -> list[int]:
    return [elements(shape[d + 1 :]) for d in range(len(shape))]


def record_strides(shape: list[int], strides: list[int]) -> list[int]:
    if 0 in shape:
        return [1 for _ in shape]
    return [1 if shape[d] == 1 else strides[d] for d in range(len(shape))]


def views_all(alias: Alias, tensor: Tensor) -> bool:
    return (
        alias.holder == tensor.name
        and alias.offset == 0
        and alias.dtype == tensor.dtype
        and alias.shape == tensor.shape
        and record_strides(alias.shape, alias.strides)
        == record_strides(tensor.shape, tensor.strides or row_major(tensor.shape))
    )


def canonical_holders(model: Model) -> tuple[list[Tensor], list[Alias]]:
    """Return the tensors and aliases under the names that records use."""
    tensors, aliases = [], []
    for tensor in model.tensors:
        mine = [alias for alias in model.aliases if alias.holder == tensor.name]
        least = min([tensor.name] + [alias.name for alias in mine if views_all(alias, tensor)])
        tensors.append(Tensor(least, tensor.dtype, tensor.shape, tensor.strides, tensor.data))
        for alias in mine:
            name = tensor.name if alias.name == least else alias.name
            strides = record_strides(alias.shape, alias.strides)
            aliases.append(Alias(name, least, alias.dtype, alias.shape, alias.offset, strides))
    return tensors, aliases


def alias_rows(aliases: list[Alias]) -> list[Any]:
    rows = [[a.name, a.holder, a.dtype, a.shape, a.offset, a.strides] for a in aliases]
    return sorted(rows, key=lambda row: str(row[0]))


def identity_document(model: Model) -> bytes:
    tensors, aliases = canonical_holders(model)
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    kinds: list[Any] = []
    for tensor in tensors:
        if tensor.kind not in kinds:
            kinds.append(tensor.kind)
    kinds.sort()
    head = {
        "aliases": alias_rows(aliases),
        "kind": [kinds.index(tensor.kind) for tensor in tensors],
        "kinds": kinds,
        "version": 2,
    }
    names = "".join(tensor.name + "\0" for tensor in tensors)
    roots = b"".join(root(tensor.data) for tensor in tensors)
    return write(head).encode() + b"\n" + names.encode() + roots


def layout_strides(shape: list[int], strides: list[int]) -> list[int]:
    """Return the strides of a view as the layout document has them."""
    wide = sorted([d for d in range(len(shape)) if shape[d] > 1], key=lambda d: -strides[d])
    if 0 in shape:
        return row_major([max(n, 1) for n in shape])
    for at, d in enumerate(wide):
        if strides[d] != elements([shape[other] for other in wide[at + 1 :]]):
            return record_strides(shape, strides)
    return row_major(shape) if wide == sorted(wide) else record_strides(shape, strides)


def layout_document(model: Model) -> bytes:
    _, aliases = canonical_holders(model)
    for alias in aliases:
        alias.strides = layout_strides(alias.shape, alias.strides)
    tensors = [tensor for layer in model.in_layers for tensor in layer]
    kinds: list[Any] = []
    for tensor in tensors:
        if tensor.kind not in kinds:
            kinds.append(tensor.kind)
    head = {
        "aliases": alias_rows(aliases),
        "kind": [kinds.index(tensor.kind) for tensor in tensors],
        "kinds": kinds,
        "layer_names": [name for name, _ in model.layers],
        "layer_tensors": [len(names) for _, names in model.layers],
        "version": 2,
    }
    return write(head).encode() + b"\n" + "\0".join(t.name for t in tensors).encode()


def packaging_document(model: Model) -> bytes:
    """Return b"" for a model without files, which has no such document."""
    if not model.files and not model.side_files:
        return b""
    names = sorted(tensor.name for tensor in model.tensors)
    files = [
        [path, metadata, [names.index(name) for name in tensors]]
        for path, metadata, tensors in model.files
    ]
    return write({"files": files, "side_files": model.side_files, "version": 2}).encode()


def pin(model: Model) -> bytes:
    identity, packaging = digest(identity_document(model)), packaging_document(model)
    return derived_digest(PIN_CONTEXT, identity + digest(packaging)) if packaging else identity


# -- places ---------------------------------------------------------------------------------------


def next_multiple(value: int, of: int) -> int:
    while value % of:
        value += 1
    return value


def layer_blocks(lengths: list[int]) -> list[tuple[int, int]]:
    """Return the blocks of a layer with tensors of these lengths, as (offset, bytes)."""
    found = []
    offset = 0
    for length in lengths:
        offset = next_multiple(offset, 256)
        end = offset + length
        while offset < end:
            found.append((offset, min(MIB, end - offset)))
            offset += found[-1][1]
    return found


def layer_chunks(lengths: list[int], chunk_size: int) -> list[list[tuple[int, int]]]:
    """Return the chunks of a layer with tensors of these lengths, each a list of blocks."""
    chunks: list[list[tuple[int, int]]] = []
    for block in layer_blocks(lengths):
        if chunks and payload(chunks[-1]) + block[1] <= chunk_size:
            chunks[-1].append(block)
        else:
            chunks.append([block])
    return chunks


def payload(chunk: list[tuple[int, int]]) -> int:
    return sum(nbytes for _, nbytes in chunk)


def chunk_size(payload_nbytes: int) -> int:
    size = MIB
    while size < 16 * MIB and 64 * size < payload_nbytes:
        size += MIB
    return size


def page(tensors: list[Tensor]) -> bytes:
    """Return the page of a layer with these tensors."""
    return b"".join(b"".join(block_digests(tensor.data)) for tensor in tensors)


def page_is_right(lengths: list[int], roots: list[bytes], found: bytes) -> bool:
    """Return True if `found` is the page of tensors with these lengths and roots."""
    for length, expected in zip(lengths, roots, strict=True):
        count = len(layer_blocks([length]))
        mine, found = found[: 32 * count], found[32 * count :]
        if derived_digest(ROOT_CONTEXT, length.to_bytes(8, "little") + mine) != expected:
            return False
    return found == b""


def pattern(seed: int, nbytes: int) -> bytes:
    """Return the bytes of the test vectors: byte i is (seed + i + i // 251) mod 256."""
    period = 251 * 256
    once = bytes((seed + i + i // 251) % 256 for i in range(min(nbytes, period)))
    return (once * (nbytes // period + 1))[:nbytes]
