"""The three documents of a manifest: how to write them, and how to check a peer's.

*layout*: the layers and their tensors in order, as columns. *identity*: the canonical tensor
records, sorted by name, with each tensor's root; it depends on the weights alone, so its digest is
the model's identity. *packaging*: the files of `--out`, with tensors as indices into the sorted
names; weights without files have none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import cast

from mx.core.canonical import (
    join_binary,
    read_json,
    read_names,
    split_binary,
    take,
    take_list,
    write_json,
    write_names,
)
from mx.core.digest import document_digest, tensor_root
from mx.core.grid import MOST_CHUNK_BYTES
from mx.core.identity import IdentityRecords, kind_to_json
from mx.core.layout import (
    MAX_TENSORS,
    Columns,
    Kind,
    TensorSpec,
    build_layout,
    kind_nbytes,
    plan_layout,
    planned_again,
)
from mx.core.layout_rules import RULES
from mx.core.packaging import (
    MAX_COMPANIONS,
    MAX_SIDE_FILE_BYTES,
    MAX_SIDE_FILES,
    MAX_SIDE_FILES_BYTES,
    TENSOR_SUFFIX,
    bad_companion_path,
    bad_path,
    bad_path_set,
    bad_side_path,
)
from mx.core.types import (
    Alias,
    Companion,
    Layout,
    Manifest,
    ManifestRef,
    PackagedFile,
    Packaging,
    SideFile,
)
from mx.core.versions import HINT
from mx.errors import ManifestError
from mx.text import can_be_encoded, shown

__all__ = ["TensorSpec", "decode", "encode", "kind_nbytes", "plan_layout"]

#: The most chunks of a model.
MAX_CHUNKS = 1 << 20
#: Of the packaging document. That of the layout document is the layout version.
PACKAGING_VERSION = 2
#: What an earlier release leaves out: side files that it would refuse, and further tensor files.
_NEWER, _COMPANIONS = "more_side_files", "companions"


def encode(
    layout: Layout,
    packaging: Packaging,
    roots: Mapping[str, bytes],
    side_documents: Mapping[bytes, bytes] | None = None,
) -> Manifest:
    """Return the manifest of one variant.

    Args:
        layout: Made by `plan_layout`.
        packaging: The files.
        roots: The 32-byte root of every tensor of the layout, not of aliases.
        side_documents: The side files by digest.

    Returns:
        The manifest; its `documents` hold the three documents and the side files.

    Raises:
        ManifestError: `decode` would refuse the manifest.
    """
    names = [tensor.name for tensor in layout.tensors]
    index_of: dict[Kind, int] = {}
    kind = [
        index_of.setdefault((t.dtype, t.shape, t.stride), len(index_of)) for t in layout.tensors
    ]
    kinds = list(index_of)
    counts = [0] * len(layout.layers)
    for tensor in layout.tensors:
        counts[tensor.layer] += 1
    layers = [(layer.name, count) for layer, count in zip(layout.layers, counts, strict=True)]
    columns = (layers, names, kinds, kind, list(layout.aliases))
    version = layout.version
    if planned_again(columns, version) != columns or build_layout(*columns).layers != layout.layers:
        raise ManifestError("the layout was not made by plan_layout")
    _check_chunks(layout)
    _check_packaging(packaging, layout, names)
    records = IdentityRecords(names, kinds, kind, layout.aliases)
    identity = records.document(roots)
    in_order = tuple([roots[name] for name in names])
    _check_roots(layout, in_order)
    places = _layout_document(columns, version)
    files = _packaging_document(packaging, names) if packaging != Packaging() else b""
    documents = {document_digest(each): each for each in (identity, places, files) if each}
    return Manifest(
        ManifestRef(
            document_digest(identity),
            document_digest(places),
            document_digest(files) if files else b"",
            (len(identity), len(places), len(files)),
            version,
        ),
        layout,
        packaging,
        in_order,
        dict(side_documents or {}) | documents,
    )


def decode(ref: ManifestRef, documents: Mapping[bytes, bytes]) -> Manifest:
    """Check a manifest from an untrusted peer, and return it.

    Checks digests and sizes against `ref`, every number, name and path, and the documents against
    each other: there is one valid layout of these weights. `Layout.tensors` is built only on first
    use.

    Args:
        ref: The digests and sizes of the documents.
        documents: The documents by digest, from anywhere.

    Raises:
        ManifestError: A document is missing, malformed, or contradicts `ref` or another document.
    """
    identity, layout_data, packaging_data = _verified(ref, documents)
    version, columns = _read_layout(layout_data)
    if version != ref.layout_version:
        raise ManifestError(
            f"the layout has version {version}, not {ref.layout_version} as announced",
            hint="its source is broken or lies",
        )
    layout = build_layout(*columns, version=version)
    if _layout_document(planned_again(columns, version), version) != layout_data:
        raise ManifestError(
            "the layout is not the one that follows from these tensors",
            hint="its source is broken or lies",
        )
    _, names, kinds, kind, aliases = columns
    roots_of = IdentityRecords(names, kinds, kind, aliases).read(identity)
    roots = tuple(map(roots_of.__getitem__, names))
    _check_roots(layout, roots)
    _check_chunks(layout)
    packaging = read_packaging(packaging_data, names) if ref.packaging else Packaging()
    _check_packaging(packaging, layout, names)
    own = {digest: documents[digest] for digest, _ in ref.documents}
    return Manifest(ref, layout, packaging, roots, own)


def _verified(ref: ManifestRef, documents: Mapping[bytes, bytes]) -> tuple[bytes, bytes, bytes]:
    names = {ref.identity: "identity", ref.layout: "layout", ref.packaging: "packaging"}
    if bool(ref.packaging) != bool(ref.sizes[2]):
        raise ManifestError("the packaging document has a digest or a size, but not both")
    found = {b"": b""}
    for digest, nbytes in ref.documents:
        data = documents.get(digest)
        if data is None:
            raise ManifestError(f"the {names[digest]} document is missing")
        if len(data) != nbytes or document_digest(data) != digest:
            raise ManifestError(
                f"the {names[digest]} document does not match its announced digest and size"
            )
        found[digest] = data
    return found[ref.identity], found[ref.layout], found[ref.packaging]


def _check_roots(layout: Layout, roots: Sequence[bytes]) -> None:
    """Check the roots that no page proves: those of layers without bytes."""
    for layer in layout.layers:
        if not layer.nbytes:
            first, end = layer.first_tensor, layer.first_tensor + len(layer.extents)
            if set(roots[first:end]) != {tensor_root(0, b"")}:
                raise ManifestError(f"layer {layer.name} is empty, and its roots are not")


def _check_chunks(layout: Layout) -> None:
    """A manifest of a few bytes may describe any number of chunks, and a reader keeps something for
    each."""
    if layout.payload_nbytes > MAX_CHUNKS * MOST_CHUNK_BYTES:
        raise ManifestError(f"{layout.payload_nbytes} bytes are more than any model has")


# -- layout ---------------------------------------------------------------------------------------


def _layout_document(columns: Columns, version: int) -> bytes:
    layers, names, kinds, kind, aliases = columns
    head = {
        "aliases": [
            [a.name, a.target, a.dtype, a.shape, a.offset_bytes, a.stride] for a in aliases
        ],
        "kind": kind,
        "kinds": [kind_to_json(each) for each in kinds],
        "layer_names": [name for name, _ in layers],
        "layer_tensors": [count for _, count in layers],
        "version": version,
    }
    return join_binary(write_json(head), write_names(names))


def _read_layout(data: bytes) -> tuple[int, Columns]:
    what = "layout"
    head, raw = split_binary(data, what)
    document = read_json(head, what)
    version = _version_of(document, what, tuple(RULES))
    labels = take_list(document, "layer_names", str, what)
    counts = take_list(document, "layer_tensors", int, what)
    if raw.count(b"\0") >= MAX_TENSORS:  # as text they take thirty times their size
        raise ManifestError(f"there are more than {MAX_TENSORS} tensors and aliases")
    names = read_names(raw, what)
    kind = take_list(document, "kind", int, what)
    if len(labels) != len(counts):
        raise ManifestError("the layout's columns differ in length")
    kinds: list[Kind] = []
    for entry in take_list(document, "kinds", list, what):
        match entry:
            case [str(dtype), list(shape)]:
                kinds.append((dtype, _ints(shape), ()))
            case [str(dtype), list(shape), [_, *_] as stride]:
                kinds.append((dtype, _ints(shape), _ints(stride)))
            case _:
                raise ManifestError("a kind in the layout document is malformed")
    aliases = []
    for entry in take_list(document, "aliases", list, what):
        match entry:
            case [str(name), str(target), str(dtype), list(shape), int(offset), list(stride)]:
                offset, *_ = _ints([offset])
                aliases.append(Alias(name, target, dtype, _ints(shape), offset, _ints(stride)))
            case _:
                raise ManifestError("an alias in the layout document is malformed")
    return version, (list(zip(labels, counts, strict=True)), names, kinds, kind, aliases)


def _ints(values: list[object]) -> tuple[int, ...]:
    if not set(map(type, values)) <= {int}:
        raise ManifestError("a shape, stride or index holds something that is not an integer")
    return tuple(cast(list[int], values))


def _version_of(document: dict[str, object], what: str, known: Sequence[int]) -> int:
    version = take(document, "version", int, what)
    if version not in known:
        reads = " and ".join(map(str, sorted(known)))
        raise ManifestError(
            f"the {what} document has version {str(version)[:9]}, this mx reads {reads}",
            hint=HINT,
        )
    return version


# -- packaging ------------------------------------------------------------------------------------


def _packaging_document(packaging: Packaging, names: list[str]) -> bytes:
    index_of = {name: i for i, name in enumerate(sorted(names))}
    unknown = [name for file in packaging.files for name in file.tensors if name not in index_of]
    if unknown:
        raise ManifestError(f"the files hold {unknown[0]!r}, which is not a tensor of the layout")
    sides: dict[bool, list[object]] = {False: [], True: []}
    for side in packaging.side_files:
        sides[side.newer].append([side.path, side.nbytes, side.digest.hex()])
    document: dict[str, object] = {
        "files": [
            [
                file.path,
                # Pairs: a header's metadata keeps its order.
                None if file.metadata is None else list(file.metadata.items()),
                [index_of[name] for name in file.tensors],
            ]
            for file in packaging.files
        ],
        "side_files": sides[False],
        "version": PACKAGING_VERSION,
    }
    # The release before reads what it knows, and leaves these out.
    companions = [
        [each.path, each.nbytes, each.identity.hex(), each.packaging.hex()]
        for each in packaging.companions
    ]
    newer = {_NEWER: sides[True], _COMPANIONS: companions}
    return write_json(document | {key: found for key, found in newer.items() if found})


def read_packaging(data: bytes, names: list[str]) -> Packaging:
    """Return what a packaging document says; `encode` checks it.

    Args:
        data: The document, from anywhere.
        names: Those of the model's tensors.

    Raises:
        ManifestError: It is malformed.
    """
    what = "packaging"
    document = read_json(data, what)
    _version_of(document, what, (PACKAGING_VERSION,))
    ordered = sorted(names)
    files = []
    for entry in take_list(document, "files", list, what):
        match entry:
            case [str(path), (None | list()) as pairs, list(indices)]:
                numbers = _ints(indices)
                if numbers and not (min(numbers) >= 0 and max(numbers) < len(ordered)):
                    raise ManifestError(f"{shown(path)} holds a tensor that is not in the layout")
                tensors = tuple(map(ordered.__getitem__, numbers))
                files.append(PackagedFile(path, _metadata(pairs), tensors))
            case _:
                raise ManifestError("a file in the packaging document is malformed")
    side_files = []
    keys = ["side_files", *([_NEWER] if _NEWER in document else [])]
    for key in keys:
        for entry in take_list(document, key, list, what):
            match entry:
                case [str(path), int(nbytes), str(digest)] if type(nbytes) is int:
                    side_files.append(SideFile(path, nbytes, _unhex(digest), key == _NEWER))
                case _:
                    raise ManifestError("a side file in the packaging document is malformed")
    companions = []
    for entry in take_list(document, _COMPANIONS, list, what) if _COMPANIONS in document else ():
        match entry:
            case [str(path), int(nbytes), str(identity), str(digest)] if type(nbytes) is int:
                companions.append(Companion(path, nbytes, _unhex(identity), _unhex(digest)))
            case _:
                raise ManifestError("a companion in the packaging document is malformed")
    if not files and not side_files:  # then there is no document: one packaging has one pin
        raise ManifestError("the packaging document holds no files")
    return Packaging(tuple(files), tuple(side_files), tuple(companions))


def _metadata(pairs: list[object] | None) -> dict[str, str] | None:
    if pairs is None:
        return None
    found: dict[str, str] = {}
    for pair in pairs:
        match pair:
            case [str(key), str(value)] if key not in found and can_be_encoded(key + value):
                found[key] = value
            case _:
                raise ManifestError("a file's metadata in the packaging document is malformed")
    return found


def _unhex(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32 or digest.hex() != text:
        raise ManifestError("a file's digest is not 64 hexadecimal digits")
    return digest


def _check_packaging(packaging: Packaging, layout: Layout, names: list[str]) -> None:
    for file in packaging.files:
        reason = bad_path(file.path)
        if reason is None and not file.path.endswith(TENSOR_SUFFIX):
            reason = f"does not end in {TENSOR_SUFFIX}"
        if reason is not None:
            raise ManifestError(f"the tensor file {shown(file.path)} {reason}")
    packed = list(chain.from_iterable(file.tensors for file in packaging.files))
    held = set(packed)
    if packaging.files and len(held) != len(names):
        raise ManifestError("the files do not hold each tensor")
    if len(packed) > len(held):
        _check_copies(packaging, layout)
    if len(packaging.companions) > MAX_COMPANIONS:
        raise ManifestError(f"there are more than {MAX_COMPANIONS} companions")
    for each in packaging.companions:
        reason = bad_companion_path(each.path)
        if reason is None and not 0 < each.nbytes <= MAX_CHUNKS * MOST_CHUNK_BYTES:
            reason = "has no size that a model has"
        if reason is not None:
            raise ManifestError(f"the companion {shown(each.path)} {reason}")
    if len(packaging.side_files) > MAX_SIDE_FILES:
        raise ManifestError(f"there are more than {MAX_SIDE_FILES} side files")
    for side in packaging.side_files:
        reason = bad_side_path(side.path)
        if reason is None and not 0 <= side.nbytes <= MAX_SIDE_FILE_BYTES:
            reason = "is too large"
        if reason is not None:
            raise ManifestError(f"the side file {shown(side.path)} {reason}")
    if sum(side.nbytes for side in packaging.side_files) > MAX_SIDE_FILES_BYTES:
        raise ManifestError(f"the side files have more than {MAX_SIDE_FILES_BYTES} bytes")
    every = (packaging.files, packaging.side_files, packaging.companions)
    reason = bad_path_set(map(attrgetter("path"), chain(*every)))
    if reason is not None:
        raise ManifestError(f"the files clash: {reason}")


def _check_copies(packaging: Packaging, layout: Layout) -> None:
    """Check the tensors that several files hold: in `--out` each takes its bytes again."""
    nbytes = {tensor.name: tensor.nbytes for tensor in layout.tensors}
    if any(len(set(file.tensors)) != len(file.tensors) for file in packaging.files):
        raise ManifestError("a file holds a tensor twice")
    total = sum(nbytes.get(name, 0) for file in packaging.files for name in file.tensors)
    if total > 2 * layout.payload_nbytes:
        raise ManifestError("the files hold tensors again that have more bytes than the model")
