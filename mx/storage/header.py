"""Reads and checks safetensors headers: what a file holds and where, without its bytes.

The safetensors library accepts headers that no honest writer makes (duplicate keys, names that
look like paths, files without tensors). Here they are errors that name the file and the place.
A tensor may start anywhere: a misaligned start is common in older files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from mx.core.json_bounds import check_json
from mx.core.layout import MAX_TENSORS, TensorSpec, kind_nbytes
from mx.core.packaging import bad_tensor_name
from mx.core.types import DTYPE_BITS
from mx.errors import CheckpointError, ManifestError
from mx.text import can_be_encoded, shown
from mx.units import align_up

MAX_HEADER_BYTES = 100_000_000
_HINT = "the file is damaged or was not written by safetensors: download or save it again"


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of one file. `begin` and `end` count bytes from the file's first byte."""

    spec: TensorSpec
    begin: int
    end: int


#: Positions in a file, and the views that the bytes from there on belong in.
Places = Sequence[tuple[int, memoryview]]


class StoredBytes(Protocol):
    """The bytes of one open file of a checkpoint. Methods are thread-safe."""

    @property
    def device(self) -> int | str:
        """The number of the drive (st_dev) that it is on, or the name of a store."""

    def read_exactly(self, view: memoryview, position: int, nbytes: int) -> None:
        """Fill the first `nbytes` of `view` with what begins at `position`. What follows in `view`
        may be written to.

        Raises:
            CheckpointError: The file has become too short, or has changed.
            LocalError: The disk fails.
        """

    def window(self, begin: int, end: int, buffer: memoryview) -> memoryview:
        """Return the bytes [begin, end). They may be in `buffer`, which is page-aligned, and longer
        by two times `DIRECT_ALIGNMENT_BYTES`. Raises as `read_exactly`."""

    def scatter(
        self, begin: int, end: int, buffer: memoryview, places: Places
    ) -> tuple[memoryview, list[tuple[int, int]]]:
        """Read the bytes [begin, end), as far as possible to their places, without a copy.

        Args:
            begin: The first byte.
            end: After the last one.
            buffer: As for `window`.
            places: Positions between them, and the views that belong there, in order.

        Returns:
            The bytes, as `window`, without those that are in place; and for each place which bytes
            of its view are, [first, end): (0, 0) if none are.

        Raises:
            MxError: As `read_exactly`.
        """

    def check_unchanged(self) -> None:
        """Raise CheckpointError if the file changed since its header was read."""

    def stamp(self) -> tuple[int, int, int, int, int] | None:
        """Return (device, inode, size, mtime_ns, ctime_ns) of the file of this machine that was
        read; None if it may have been changed since, or is not such a file."""

    def close(self) -> None:
        """Close the file, when no read is running. Idempotent."""


class StoredFile(Protocol):
    """One safetensors file of a checkpoint, wherever it is kept. `path` is relative to the
    checkpoint, `location` says where it is read.

    `tensors` are in file order and cover every byte from the end of the header to that of the file.
    """

    @property
    def path(self) -> str: ...
    @property
    def location(self) -> Path | str: ...
    @property
    def metadata(self) -> dict[str, str] | None: ...
    @property
    def tensors(self) -> tuple[FileTensor, ...]: ...
    def open(self) -> StoredBytes:
        """Open the file.

        Raises:
            CheckpointError: It is gone, or changed since its header was read.
            ConfigError: This user may not read it.
            LocalError: The disk fails.
        """


def parse_header(
    header: bytes, location: Path | str, file_nbytes: int
) -> tuple[dict[str, str] | None, tuple[FileTensor, ...]]:
    """Return the metadata and the tensors of a file, in file order.

    Args:
        header: The JSON, without its 8 bytes of length.
        location: Names the file in errors.
        file_nbytes: The length of the file.

    Raises:
        CheckpointError: The header is malformed.
    """
    entries = _load(header, location)
    metadata = _metadata(entries.pop("__metadata__", None), location)
    if len(entries) > MAX_TENSORS:
        fail(location, f"it holds {len(entries)} tensors; {MAX_TENSORS} is the most")
    start = 8 + len(header)
    tensors = [_tensor(name, entry, start, location) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = start
    for tensor in tensors:
        if tensor.begin != expected:
            what = "overlaps the one before it" if tensor.begin < expected else "follows a hole"
            fail(location, f"tensor {shown(tensor.spec.name)} at byte {tensor.begin} {what}")
        expected = tensor.end
    if expected != file_nbytes:
        what = "is truncated" if file_nbytes < expected else "has bytes that no tensor owns"
        fail(location, f"it {what}: its tensors end at byte {expected}, the file at {file_nbytes}")
    return metadata, tuple(tensors)


def header_bytes(
    specs: Sequence[TensorSpec], metadata: dict[str, str] | None, alignment_nbytes: int = 8
) -> bytes:
    """Return all bytes before the first tensor, length included, for tensors in this order.

    The header is spelt as the safetensors library spells it, so that a copy of a file that the
    library wrote has the same bytes; it is padded with spaces, so that the first tensor begins at
    a multiple of `alignment_nbytes`.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": spec.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header = header.ljust(align_up(8 + len(header), alignment_nbytes) - 8)
    return len(header).to_bytes(8, "little") + header


def _load(header: bytes, location: Path | str) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            both = " and ".join(shown(str(each)) for name, each in pairs if name == key)
            raise ValueError(f"the key {shown(key)} comes twice, with {both}")
        return found

    def integer(text: str) -> int:
        if text.startswith("-"):  # this refuses "-0" too
            raise ValueError(f"{text[:20]} is negative")
        return int(text)

    def refuse(text: str) -> NoReturn:
        raise ValueError(f"{text[:20]} is not an integer")

    try:
        check_json(header)
        text = header.decode()
        if not text.startswith("{"):
            raise ValueError("it does not start with '{'")
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=refuse,
            parse_constant=refuse,
        )
    except (ValueError, RecursionError) as error:
        fail(location, f"its header is not valid JSON: {error}")
    if not isinstance(value, dict):
        fail(location, "its header is not a JSON object")
    return value


def _metadata(value: object, location: Path | str) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        fail(location, "its __metadata__ is not an object of strings")
    for key, text in value.items():
        if not isinstance(text, str) or not can_be_encoded(key + text):
            fail(location, f"its __metadata__ entry {shown(key)} is not a string")
    return value


def _tensor(name: str, entry: object, start: int, location: Path | str) -> FileTensor:
    where = f"tensor {shown(name)}"
    reason = bad_tensor_name(name) if can_be_encoded(name) else "is half a surrogate pair"
    if reason is not None:
        fail(location, f"the name of {where} {reason}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        fail(location, f"{where} is not described by dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        fail(
            location,
            f"{where} has the unknown dtype {shown(str(dtype))}",
            hint="mx may be too old for it",
        )
    if not _are_ints(shape) or not _are_ints(offsets) or len(offsets) != 2:
        fail(location, f"{where} has a shape or offsets that are not lists of integers")
    spec = TensorSpec(name, dtype, tuple(shape))
    try:
        nbytes = kind_nbytes((dtype, spec.shape, ()))
    except ManifestError as error:
        fail(location, f"{where}: {error.message}")
    begin, end = offsets
    if end - begin != nbytes:
        fail(location, f"{where} takes {nbytes} bytes by dtype and shape, not {begin}..{end}")
    return FileTensor(spec, start + begin, start + end)


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def fail(location: Path | str, what: str, *, hint: str = _HINT) -> NoReturn:
    """Raise the CheckpointError of a malformed file."""
    raise CheckpointError(f"{location}: {what}", hint=hint)
