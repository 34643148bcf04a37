"""A checkpoint in any store: its files listed, their headers read, and its bytes by ranges."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from mx.contexts import Undo
from mx.core.naming import natural_key
from mx.core.packaging import MAX_SIDE_FILE_BYTES
from mx.errors import CheckpointError, ConfigError
from mx.storage.companions import take_companions
from mx.storage.header import MAX_HEADER_BYTES, FileTensor, Places, fail, parse_header
from mx.storage.hints import LFS_MAGIC, lfs_pointer
from mx.storage.safetensors import Checkpoint, assembled
from mx.storage.shards import check_paths, chosen_files, shards_of, weight_map
from mx.storage.side_files import MAX_DEPTH, MAX_ENTRIES, take_side_files
from mx.stores import ListedFile, WeightStore
from mx.threads import Threads
from mx.units import KIB

FOLDER_HINT = "name the folder of a checkpoint"
#: What is read of each file at first: most headers are shorter.
_FIRST_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class RangedFile:
    """A `StoredFile` in a store. Its bytes are read while it is as it was listed."""

    path: str
    metadata: dict[str, str] | None
    tensors: tuple[FileTensor, ...]
    listed: ListedFile
    store: WeightStore = field(repr=False)

    @property
    def location(self) -> str:
        return f"{self.store.place}/{self.listed.path}"

    def open(self) -> RangedBytes:
        """Return its bytes, without a read."""
        return RangedBytes(self)


class RangedBytes:
    """The `StoredBytes` of a `RangedFile`."""

    def __init__(self, file: RangedFile) -> None:
        self._file = file
        self.device = file.store.place

    def read_exactly(self, view: Any, position: int, nbytes: int) -> None:
        """Read as `StoredBytes.read_exactly` does. Raises also as `WeightStore.read`."""
        here = view[:nbytes]
        try:
            _read(self._file.store, self._file.listed, position, here)
        finally:
            if isinstance(here, memoryview):
                here.release()

    def window(self, begin: int, end: int, buffer: memoryview) -> memoryview:
        """Read into the buffer. Raises as `read_exactly`."""
        self.read_exactly(buffer, begin, end - begin)
        return buffer[: end - begin]

    def scatter(
        self, begin: int, end: int, buffer: memoryview, places: Places
    ) -> tuple[memoryview, list[tuple[int, int]]]:
        """Read one place by itself, or all into the buffer: in either case by one request."""
        if [position for position, _ in places] == [begin]:
            view = places[0][1]
            self.read_exactly(view, begin, end - begin)
            return buffer[:0], [(0, len(view))]
        return self.window(begin, end, buffer), [(0, 0) for _ in places]

    def check_unchanged(self) -> None:
        """Do nothing: a store that vouches for versions has checked it at every read."""

    def stamp(self) -> None:
        """Return None: it is not a file of this machine."""

    def close(self) -> None:
        """Do nothing: the store is the checkpoint's."""


def open_listed(store: WeightStore) -> Checkpoint:
    """List a store, and read and check its files' headers and its side files. Blocks.

    Args:
        store: The store. The checkpoint closes it; if this raises, it is closed.

    Raises:
        ConfigError: It holds no checkpoint.
        CheckpointError: It is malformed.
        MxError: As `WeightStore.list` and `WeightStore.read`.
    """
    with Undo(store.close):
        return _open(store)


def _open(store: WeightStore) -> Checkpoint:
    left_out: dict[str, str] = {}
    listed = {}
    for file in islice(store.list(), MAX_ENTRIES):
        if _is_near(file.path):
            listed[file.path] = file
        else:
            left_out[file.path] = f"is hidden, or more than {MAX_DEPTH} folders deep"
    names = sorted((path for path in listed if "/" not in path), key=natural_key)
    where = store.place
    shards, index = chosen_files(names, where)
    shard_of = None
    if index is not None:
        shard_of = _index(store, listed[index])
        shards = shards_of(shard_of)
    if not shards:
        what = "holds no .safetensors file" if listed else "is not there, or is empty"
        raise ConfigError(f"{where} {what}", hint=FOLDER_HINT)
    check_paths(shards, where)
    missing = next((shard for shard in shards if shard not in listed), None)
    if missing is not None:
        hint = "a shard is missing: upload the checkpoint again"
        raise CheckpointError(f"{where}/{missing} is not there", hint=hint)
    with Threads(store.threads, "mx-store") as pool:
        files = list(pool.map(lambda shard: _file(store, listed[shard]), shards))

    def read(file: ListedFile) -> bytes:
        return bytes(_bytes(store, file, 0, min(file.nbytes, MAX_SIDE_FILE_BYTES + 1)))

    def open_file(name: str, file: ListedFile) -> RangedFile:
        return replace(_file(store, file), path=name)

    walked = sorted(listed.items(), key=lambda item: _walked(item[0]))
    companions = take_companions(walked, open_file, files, (), left_out)
    taken = [*shards, *(each for each, _ in companions)]
    side = take_side_files(walked, read, taken, left_out)
    checkpoint = assembled(where, files, index, shard_of, side)
    return replace(checkpoint, companions=companions, store=store)


def _is_near(path: str) -> bool:
    folders = path.split("/")[:-1]
    return len(folders) <= MAX_DEPTH and not any(name.startswith(".") for name in folders)


def _walked(path: str) -> tuple[int, list[str]]:
    """Return the key that sorts files as a walk by levels meets them: a pin covers this order."""
    parts = path.split("/")
    return len(parts), parts


def _index(store: WeightStore, file: ListedFile) -> dict[str, str]:
    where = f"{store.place}/{file.path}"
    if file.nbytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where} has {file.nbytes} bytes; 100 MB is the most")
    return weight_map(bytes(_bytes(store, file, 0, file.nbytes)), where)


def _file(store: WeightStore, file: ListedFile) -> RangedFile:
    """Read and check one file's header."""
    where, size = f"{store.place}/{file.path}", file.nbytes
    first = _bytes(store, file, 0, min(size, _FIRST_BYTES))
    if first[: len(LFS_MAGIC)] == LFS_MAGIC:
        raise lfs_pointer(where)
    if len(first) < 8:
        fail(where, f"it has {len(first)} bytes, too few for a header's length")
    nbytes = int.from_bytes(first[:8], "little")
    if nbytes > MAX_HEADER_BYTES:
        fail(where, f"its header would have {nbytes} bytes; 100 MB is the most")
    if 8 + nbytes > size:
        fail(where, f"it ends at byte {size}, inside its header of {nbytes} bytes")
    header = bytes(first[8 : 8 + nbytes])
    if len(header) < nbytes:
        header += _bytes(store, file, len(first), 8 + nbytes)
    metadata, tensors = parse_header(header, where, size)
    return RangedFile(file.path, metadata, tensors, file, store)


def _bytes(store: WeightStore, file: ListedFile, begin: int, end: int) -> bytearray:
    data = bytearray(end - begin)
    if data:
        with memoryview(data) as view:
            _read(store, file, begin, view)
    return data


def _read(store: WeightStore, file: ListedFile, begin: int, view: Any) -> None:
    nbytes = store.read(file, begin, view)
    if nbytes != len(view):
        raise CheckpointError(
            f"{store.place}/{file.path}: bytes {begin} to {begin + len(view)} were asked for, "
            f"{nbytes} came",
            hint="it was truncated while it was read: upload it again",
        )
