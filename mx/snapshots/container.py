"""The folder of a snapshot: `snapshot.json`, and for each rank its tensors, digests and files.

    snapshot.json              what all of it is; written last, so that a folder without is none
    files/                     configuration and tokenizer
    rank0/weights.safetensors  the tensors of the first rank, as they are stored
    rank0/digests/weights.mx   digests of its blocks (`mx.snapshots.digests`)
    rank0/.mx-rank.json        the rank alone, for the process that writes `snapshot.json`

A tensor is written as it lies in memory: of one whose dimensions are stored in another order the
file's header has the stored shape, and `snapshot.json` the model's shape and strides. Tensors of
whole sectors come first, behind a header that is padded to a sector, so that direct reads of these
need no second buffer. What shares the memory of another tensor is not in the file, but an alias in
`snapshot.json`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import mx
from mx.core.canonical import read_json, write_json
from mx.core.digest import document_digest, pin_of
from mx.core.packaging import RANK
from mx.core.types import Alias, Companion, Layout, Manifest, ModelKey, PackagedFile, Packaging
from mx.core.variant import (
    ProcessingKey,
    document_of,
    members_of,
    membership,
    note_document,
    why_not_a_variant,
)
from mx.errors import CheckpointError, ConfigError, ManifestError
from mx.storage.osfile import open_regular, read_error
from mx.storage.writer import CheckpointWriter
from mx.text import shown

#: Of `snapshot.json`. A reader refuses what is newer.
FORMAT = 1
SNAPSHOT = "snapshot.json"
WEIGHTS = "weights.safetensors"
FILES = "files"
KV = "kv"  # KV blocks, which `mx.kv` reads and writes
SECTOR_BYTES = 4096
#: The longest `snapshot.json`.
MAX_BYTES = 64 << 20
#: The most ranks of a snapshot.
_MAX_RANKS = 4096

#: Shape and strides of a tensor.
Form = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class FrozenRank:
    """What one rank of a snapshot holds.

    `packaging` is the document of the model's files, as its sources have it, b"" for none. `nbytes`
    are those of the tensors. `strides` has shape and strides of the tensors whose dimensions are
    stored in another order, by name.
    """

    variant: str
    identity: bytes
    packaging: bytes
    nbytes: int
    strides: Mapping[str, Form]
    aliases: tuple[Alias, ...]

    @classmethod
    def of(cls, variant: str, manifest: Manifest) -> FrozenRank:
        """Return what a rank of this manifest is."""
        layout, ref = manifest.layout, manifest.ref
        return cls(
            variant,
            ref.identity,
            manifest.documents[ref.packaging] if ref.packaging else b"",
            layout.payload_nbytes,
            {each.name: (each.shape, each.stride) for each in layout.tensors if each.stride},
            layout.aliases,
        )

    @property
    def pin(self) -> str:
        """What `mx pull NAME@PIN` takes: of the weights, and of their files if there are any. In
        hexadecimal."""
        return pin_of(
            self.identity, document_digest(self.packaging) if self.packaging else b""
        ).hex()

    def to_json(self) -> dict[str, object]:
        """Return it as `read` takes it."""
        return {
            "aliases": [list(each) for each in self.aliases],
            "bytes": self.nbytes,
            "identity": self.identity.hex(),
            "packaging": self.packaging.decode(),
            "strides": {name: list(form) for name, form in self.strides.items()},
            "variant": self.variant,
        }

    @classmethod
    def read(cls, found: object) -> FrozenRank:
        """Return the rank that a document has. Raises ManifestError."""
        match found:
            case {
                "aliases": list(aliases),
                "bytes": int(nbytes),
                "identity": str(identity),
                "packaging": str(packaging),
                "strides": dict(strides),
                "variant": str(variant),
            } if nbytes >= 0 and not why_not_a_variant(variant):
                forms = {name: _form(form) for name, form in strides.items()}
                read = tuple(map(_alias, aliases))
                return cls(variant, _digest(identity), packaging.encode(), nbytes, forms, read)
        raise ManifestError("a rank is malformed")


@dataclass(frozen=True)
class Snapshot:
    """What `snapshot.json` says; `ranks` are in the order of their bundle.

    `signature` is as `mx.snapshots.signing` makes it, empty for none.
    """

    folder: Path
    name: str
    revision: str
    ranks: tuple[FrozenRank, ...]
    made_by: str = mx.__version__
    signature: Mapping[str, str] | None = None

    def key(self, number: int) -> ModelKey:
        """Return what a rank is a replica of."""
        return ModelKey(self.name, self.revision, self.ranks[number].variant)

    def signed_text(self) -> bytes:
        """Return what a signature is of: all that is said but the signature."""
        return b"mx snapshot\n" + write_json(self._document())

    def _document(self) -> dict[str, object]:
        return {
            "fields": document_of(self.ranks[0].variant),
            "format": FORMAT,
            "model": self.name,
            "mx": self.made_by,
            "ranks": [each.to_json() for each in self.ranks],
            "revision": self.revision,
        }

    def encode(self) -> bytes:
        """Return the content of `snapshot.json`."""
        signed = {} if self.signature is None else {"signature": dict(self.signature)}
        return write_json(self._document() | signed)


def folder_of(folder: Path, number: int) -> Path:
    """Return the folder of a rank."""
    return folder / f"rank{number}"


def read(folder: Path) -> Snapshot:
    """Read and check what is in a snapshot's folder. Whose signature it has is not looked at.

    Args:
        folder: The folder.

    Raises:
        ConfigError: There is no snapshot, or only a part of one, or this user may not read it.
        CheckpointError: `snapshot.json` is malformed, or of a newer format.
        LocalError: The disk fails.
    """
    if (found := _parsed(folder, SNAPSHOT)) is not None:
        variants = [each.variant for each in found.ranks]
        if list(members_of(bundle_of(variants[0]))) != variants:
            fail(folder / SNAPSHOT, "its ranks are not all those of one bundle, in order")
        return found
    if is_begun(folder):
        raise ConfigError(
            f"{folder} holds some ranks of a snapshot, and no {SNAPSHOT}: not all were written",
            hint="run `mx freeze` again, which goes on from what is there",
        )
    raise ConfigError(
        f"{folder} is no snapshot: it has no {SNAPSHOT}", hint="name a folder of `mx freeze`"
    )


def is_begun(folder: Path) -> bool:
    """Return True if a folder holds ranks, or parts of them, and no snapshot yet."""
    found = any(folder.glob("rank*")) or any(folder.glob(".rank*"))
    return found and not (folder / SNAPSHOT).exists()


def read_rank(folder: Path) -> tuple[ModelKey, FrozenRank] | None:
    """Return what the folder of one rank holds, of a snapshot that may not be complete; None if
    there is none. Raises as `read`."""
    found = _parsed(folder, RANK)
    return None if found is None else (found.key(0), found.ranks[0])


def _parsed(folder: Path, name: str) -> Snapshot | None:
    """Return what a document in a folder says; None if there is none. Raises as `read`."""
    where = folder / name
    if (data := _content(where)) is None:
        return None
    with _malformed(where):
        match _checked(data, where):
            case {
                "model": str(model),
                "revision": str(revision),
                "ranks": [_, *_] as found,
                **more,
            }:
                ranks = tuple(map(FrozenRank.read, found[:_MAX_RANKS]))
                signature = more.get("signature")
                if signature is None or _texts(signature):
                    made_by = str(more.get("mx"))
                    return Snapshot(folder, model, revision, ranks, made_by, signature)
        raise ManifestError(
            "it does not name a model, a revision and ranks, or its signature is not one"
        )


def bundle_of(variant: str) -> str:
    """Return the bundle that a variant is a rank of: itself, if there is one rank."""
    found = membership(variant)
    if found.alone and "=" in variant:  # its rank may be written as "*"
        return str(next(ProcessingKey.parse(variant).members()))
    return found.bundle


def _content(path: Path) -> bytes | None:
    try:
        with open(open_regular(path), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise read_error(error, path) from error
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_BYTES} bytes")
    return data


def _checked(data: bytes, where: Path) -> dict[str, Any]:
    document = read_json(data, where.name)
    version = document.get("format")
    if version != FORMAT:
        said = version if type(version) is int and 0 <= version < 10**9 else "another"
        raise CheckpointError(
            f"{where}: it is of format {said}, and this mx reads {FORMAT}",
            hint=f"it was written by mx {shown(str(document.get('mx'))[:40])}: use that release",
        )
    match document:
        case {"fields": str(fields)}:
            if fields:  # of a shortened key: they are named where another engine differs
                note_document(fields)
            return document
    raise ManifestError("it has no `fields`")


@contextlib.contextmanager
def _malformed(where: Path) -> Iterator[None]:
    """Make errors of what a document says name the document."""
    try:
        yield
    except (ManifestError, ConfigError) as error:
        fail(where, error.message)
    except UnicodeEncodeError:
        fail(where, "it holds half a surrogate pair")


def fail(where: Path, what: str) -> NoReturn:
    """Raise the CheckpointError of a snapshot that is not right."""
    raise CheckpointError(f"{where}: {what}", hint="freeze the model again, into another folder")


def _texts(found: object) -> bool:
    return isinstance(found, dict) and all(isinstance(each, str) for each in found.values())


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ManifestError("an identity is not 64 hexadecimal digits")
    return digest


def _numbers(found: object) -> tuple[int, ...]:
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        raise ManifestError("a shape or strides are not lists of integers")
    return tuple(found)


def _form(found: object) -> Form:
    match found:
        case [list(shape), [_, *_] as stride] if len(shape) == len(stride):
            return _numbers(shape), _numbers(stride)
    raise ManifestError("the strides of a tensor are malformed")


def _alias(found: object) -> Alias:
    match found:
        case [str(name), str(target), str(dtype), list(shape), int(offset), list(stride)]:
            return Alias(name, target, dtype, _numbers(shape), offset, _numbers(stride))
    raise ManifestError("an alias is malformed")


# -- writing --------------------------------------------------------------------------------------


class RankWriter(CheckpointWriter):
    """Writes one rank of a snapshot as the folder `out`, in place of a checkpoint.

    Raises:
        MxError: As `CheckpointWriter`.
    """

    header_alignment_bytes = SECTOR_BYTES

    def __init__(
        self,
        key: ModelKey,
        out: Path,
        manifest: Manifest,
        *,
        keep: bool = False,
        companions: Sequence[Companion] = (),
        digests_nbytes: int = 0,
    ) -> None:
        """
        Args:
            key: What the rank is a replica of.
            out: The folder to make.
            manifest: The model's. The others are as for `CheckpointWriter`.
            companions: None: they are models of their own.
        """
        assert not companions
        self._key, self._described = key, manifest
        super().__init__(out, _as_stored(manifest), keep=keep, digests_nbytes=digests_nbytes)
        files = manifest.packaging.tensor_files
        self._tensor_files = frozenset(f"{FILES}/{each}" for each in files)

    def write_side_page(self, path: str, offset: int, data: bytes) -> None:
        """Write bytes of a side file. See `StagedWriter`."""
        super().write_side_page(f"{FILES}/{path}", offset, data)

    def finish_side_file(self, path: str) -> None:
        """Check a side file, and make it durable. See `StagedWriter`."""
        super().finish_side_file(f"{FILES}/{path}")

    def _sync(self) -> None:
        super()._sync()
        rank = FrozenRank.of(self._key.variant, self._described)
        found = Snapshot(self.folder, self._key.name, self._key.revision, (rank,))
        with open(self._staging.open_file(RANK, os.O_CREAT | os.O_WRONLY), "wb") as file:
            file.write(found.encode())
            file.flush()
            os.fsync(file.fileno())


def _as_stored(manifest: Manifest) -> Manifest:
    """Return a manifest of the same bytes, each tensor of the shape in which it is stored, in one
    file, without what says that they are packaged otherwise."""
    layout, ref = manifest.layout, manifest.ref
    tensors = []
    for each in layout.tensors:
        shape = stored_shape(each.shape, each.stride)
        tensors.append(each._replace(shape=shape, stride=()))
    # Sorting is stable: both kinds are in execution order.
    in_order = sorted(tensors, key=lambda each: each.nbytes % SECTOR_BYTES != 0)
    weights = PackagedFile(WEIGHTS, {"format": "pt"}, tuple(each.name for each in in_order))
    sides = tuple(
        each._replace(path=f"{FILES}/{each.path}") for each in manifest.packaging.side_files
    )
    return replace(
        manifest,
        ref=replace(ref, packaging=b"", sizes=(*ref.sizes[:2], 0)),
        layout=Layout(layout.layers, tensors, (), layout.version),
        packaging=Packaging((weights,), sides),
    )


def stored_shape(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor's bytes in storage order.

    Args:
        shape: The tensor's.
        stride: Its strides, () for row-major order.
    """
    if not stride:
        return shape
    order = sorted(range(len(shape)), key=lambda axis: -stride[axis])
    return tuple(shape[axis] for axis in order)
