"""KV blocks in files: segments, each of which is written once, and what reads them.

    FORM-FIRST-HEADS/SEGMENT.safetensors   blocks of one form, of the same KV heads

`FORM` is a hash of the form. A segment is a file that the safetensors library reads, too: a header
that is padded to whole sectors, `blocks` (in each row the layers of a block, one after the other),
their `names` and `digests`, and a `seal` of the header, the names and the digests, keyed with the
secret of the name's owner: what no holder of that has written is not believed.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from mx.core.canonical import read_json
from mx.core.digest import DIGEST_BYTES
from mx.errors import CheckpointError, ClosedError, MxError
from mx.kv.index import KvEntry
from mx.kv.layout import MOST_LAYERS, Rows
from mx.kv.names import ID_BYTES
from mx.kv.peer import KvLink, KvReading, fitted
from mx.kv.proof import secret_of
from mx.log import event
from mx.storage.osfile import close_file, open_regular, read_error
from mx.tasks import in_thread, unexpected
from mx.transport import Piece, Read

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_SECTOR_BYTES = 4096
#: The longest header, and the most rows of a segment. (A slot is the number of a segment, and the
#: row in that.)
_HEADER_BYTES, MOST_ROWS = 1 << 20, 1 << 20
#: The most bytes of one segment's names and digests; none that `KvFiles` writes has so many.
_INDEX_BYTES = 256 << 20
_DOMAIN = b"mx kv segment, version 1"
#: How many segments are read at the same time.
_THREADS = 4


@dataclass(frozen=True)
class Segment:
    """What a segment says of itself: the form, the first head, how many of them, the bytes of each
    layer's part, and how many blocks it has."""

    form: bytes
    first_head: int
    heads: int
    part_nbytes: tuple[int, ...]
    count: int

    @property
    def row_nbytes(self) -> int:
        """The bytes of one block."""
        return sum(self.part_nbytes)

    @property
    def index_row_nbytes(self) -> int:
        """The bytes of one block's name and digests."""
        return ID_BYTES + DIGEST_BYTES * len(self.part_nbytes)

    def header(self) -> bytes:
        """Return the header, which has the same size for any count: it is written last."""
        nbytes = -(-(len(self._text(MOST_ROWS)) + 8) // _SECTOR_BYTES) * _SECTOR_BYTES
        return (nbytes - 8).to_bytes(8, "little") + self._text(self.count).ljust(nbytes - 8)

    def _text(self, count: int) -> bytes:
        end, tensors = 0, {}
        sizes = {"blocks": self.row_nbytes, "names": ID_BYTES}
        sizes["digests"] = self.index_row_nbytes - ID_BYTES
        for name, nbytes in sizes.items():
            begin, end = end, end + count * nbytes
            shape = [count, nbytes]
            tensors[name] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, end]}
        offsets = [end, end + DIGEST_BYTES]
        tensors["seal"] = {"dtype": "U8", "shape": [DIGEST_BYTES], "data_offsets": offsets}
        said = {"form": self.form.decode(), "first_head": str(self.first_head)}
        said |= {"heads": str(self.heads), "parts": json.dumps(self.part_nbytes), "mx": "kv 1"}
        return json.dumps({"__metadata__": said, **tensors}).encode()

    def nbytes(self) -> int:
        """Return the size of the file."""
        rows = self.count * (self.row_nbytes + self.index_row_nbytes)
        return len(self.header()) + rows + DIGEST_BYTES

    def seal(self, secret: bytes, index: bytes) -> bytes:
        """Return the seal of these names and digests."""
        key = blake3(_DOMAIN, key=secret).digest()
        return blake3(self.header() + index, key=key).digest(DIGEST_BYTES)

    def folder(self) -> str:
        """Return the name of the folder for segments of this form, and of these heads."""
        return f"{form_name(self.form)}-{self.first_head}-{self.heads}"


def is_shelf(folder: Path) -> bool:
    """Return True if a folder has the name of one for segments."""
    return re.fullmatch(r"[0-9a-f]{16}-\d+-\d+", folder.name) is not None


def form_name(form: bytes) -> str:
    """Return what names of folders begin with for this form of blocks."""
    return blake3(form).hexdigest()[:16]


def shelves(roots: Sequence[Path], form: bytes) -> Iterator[tuple[Path, range]]:
    """Yield the folders below `roots` that have blocks of this form, and the heads of these."""
    for root in roots:
        for folder in root.glob(f"{form_name(form)}-*-*"):
            _, first, heads = folder.name.split("-", 2)
            if _is_number(first) and _is_number(heads) and int(heads):
                yield folder, range(int(first), int(first) + int(heads))


def read_index(path: Path, secret: bytes) -> tuple[Segment, int, bytes]:
    """Read what a segment has.

    Args:
        path: The file.
        secret: The secret of the name's owner.

    Returns:
        What it says of itself, the bytes of its header, and its names and digests: all names, then
        all digests.

    Raises:
        OSError: It can't be read.
        MxError: It is no segment, or no holder of the secret has written it.
    """
    fd = open_regular(path)
    try:
        nbytes = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        header = os.pread(fd, min(nbytes, _HEADER_BYTES), 0)
        found = _described(header)
        if found is None or found.header() != header or found.nbytes() != os.fstat(fd).st_size:
            raise CheckpointError(f"{path} is no segment of KV blocks")
        rest = found.count * found.index_row_nbytes
        if rest > _INDEX_BYTES:
            raise CheckpointError(f"{path} has more KV blocks than a segment may")
        index = os.pread(fd, rest + DIGEST_BYTES, nbytes + found.count * found.row_nbytes)
    finally:
        os.close(fd)
    if not hmac.compare_digest(index[rest:], found.seal(secret, index[:rest])):
        raise CheckpointError(f"no holder of the name's key has written {path} as it is")
    return found, nbytes, index[:rest]


def _described(header: bytes) -> Segment | None:
    match read_json(header[8:].rstrip(b" "), "segment"):
        case {
            "__metadata__": {
                "form": str(form),
                "first_head": str(first),
                "heads": str(heads),
                "parts": str(parts),
            },
            "blocks": {"shape": [int(count), int()]},
        } if _is_number(first) and _is_number(heads) and 0 < count <= MOST_ROWS:
            sizes = read_json(b'{"parts":%s}' % parts.encode(), "segment")["parts"]
            if (
                isinstance(sizes, list)
                and 0 < len(sizes) <= MOST_LAYERS
                and all(isinstance(each, int) and each > 0 for each in sizes)
            ):
                return Segment(form.encode(), int(first), int(heads), tuple(sizes), count)
    return None


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


class KvShelf:
    """The segments in one folder, read as the blocks of a pool are. Thread-safe."""

    transport = "files"

    def __init__(self, folder: Path, heads: range, reading: KvReading) -> None:
        """
        Args:
            folder: The folder.
            heads: The KV heads of its blocks.
            reading: What they are read for.
        """
        self.endpoint, self.why, self.wrong = str(folder), "it has no blocks yet", 0
        self._folder, self._heads, self._reading = folder, heads, reading
        self._secret = secret_of(reading.key, reading.name)
        self._lock = threading.Lock()  # of all below
        self._segments: dict[str, tuple[int, dict[bytes, KvEntry]]] = {}  # by file, its number too
        self._files: dict[int, tuple[Path, int]] = {}  # by number, with the bytes of the header
        self._numbers = itertools.count()
        self._entries: dict[bytes, KvEntry] = {}  # replaced, never changed
        self._link: KvLink | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mx-kv-files")

    def forked(self) -> None:
        """Have nothing in a forked child."""
        self._lock, self._entries = threading.Lock(), {}

    def heads(self) -> range:
        """Return which heads its blocks have."""
        return self._heads if self._link is not None else range(0)

    def has(self, block: bytes) -> bool:
        """Return True if a segment has a block."""
        return block in self._entries

    def begin(self, block: bytes) -> tuple[KvLink, KvEntry] | None:
        """Begin to read a block, as `KvPeer.begin`."""
        entry, link = self._entries.get(block), self._link
        return (link, entry) if entry is not None and link is not None else None

    def end(self, live: KvLink, block: bytes, entry: KvEntry, *, wrong: bool = False) -> None:
        """Note that a block was read, as `KvPeer.end`."""
        del live
        if wrong:
            name = Path(self._files.get(entry.slot // MOST_ROWS, ("",))[0]).name
            event(log, "kv.wrong", level=logging.WARNING, peer=self.endpoint, text=name)
            with self._lock:
                self.wrong += 1
                for _, entries in self._segments.values():
                    entries.pop(block, None)
                self._gather()

    def look(self) -> bool:
        """See which segments have come and gone; return True if any has. Blocks; one at a time."""
        try:
            there = {each.name for each in self._folder.iterdir() if each.suffix == SUFFIX}
        except FileNotFoundError:
            there = set()
        except OSError as error:
            self.why = str(error)
            return False
        new, gone = there - self._segments.keys(), self._segments.keys() - there
        for name in new:
            try:
                number, entries = self._read(self._folder / name)
            except OSError as error:
                log.debug("a segment of KV blocks is not read: %s", error)
                continue
            except MxError as error:
                number, entries = -1, {}
                event(log, "kv.refused", level=logging.WARNING, peer=self.endpoint, text=str(error))
            with self._lock:
                self._segments[name] = number, entries
        with self._lock:
            for name in gone:
                number, _ = self._segments.pop(name)
                self._files.pop(number, None)
            self._gather()
        return bool(new or gone)

    def _gather(self) -> None:
        entries: dict[bytes, KvEntry] = {}
        for _, each in self._segments.values():
            entries |= each
        self._entries, self.why = entries, "" if entries else "it has no blocks"

    def _read(self, path: Path) -> tuple[int, dict[bytes, KvEntry]]:
        found, header_nbytes, index = read_index(path, self._secret)
        own, heads = self._reading.memory, self._heads
        if found.form != self._reading.form or found.folder() != self._folder.name:
            raise CheckpointError(f"{path} has KV blocks of another form")
        begins = [sum(found.part_nbytes[:at]) for at in range(len(found.part_nbytes))]
        rows = tuple(
            Rows(0, begin, found.row_nbytes, (0,), nbytes)
            for begin, nbytes in zip(begins, found.part_nbytes, strict=True)
        )
        if self._link is None:
            mine, copied = fitted(own, rows, heads, str(path)) if own is not None else ((), ())
            session = _ShelfReads(self._files, found.row_nbytes, self._threads)
            self._link = KvLink(session, rows, mine, copied, heads, self.transport)
        elif self._link.rows != rows:
            raise CheckpointError(f"{path} has KV blocks of another size")
        number, size = next(self._numbers), found.index_row_nbytes - ID_BYTES
        self._files[number] = path, header_nbytes
        digests = index[found.count * ID_BYTES :]
        entries = {
            index[row * ID_BYTES : (row + 1) * ID_BYTES]: KvEntry(
                number * MOST_ROWS + row, digests[row * size : (row + 1) * size]
            )
            for row in range(found.count)
        }
        return number, entries

    async def close(self) -> None:
        """End the reads: those that have begun go on to their ends."""
        self._entries = {}
        await in_thread(self._threads.shutdown)


@dataclass(frozen=True)
class _ShelfReads:
    """Reads blocks of segments. `files` are by number, and change: each has its path, and the
    bytes of its header."""

    files: Mapping[int, tuple[Path, int]]
    row_nbytes: int
    threads: ThreadPoolExecutor

    def read(self, reads: Sequence[Read]) -> None:
        """Begin reads. Their sinks are called on threads. Raises ClosedError."""
        for each in reads:
            try:
                self.threads.submit(self._run, each)
            except RuntimeError:
                raise ClosedError("the KV reader is closed") from None

    def _run(self, read: Read) -> None:
        opened: dict[int, int] = {}
        try:
            for piece in read.pieces:
                row, within = divmod(piece.region_offset, self.row_nbytes)
                number, row = divmod(row, MOST_ROWS)
                if number not in self.files:
                    raise CheckpointError("the file of a KV block has made room for others")
                path, header_nbytes = self.files[number]
                if number not in opened:
                    opened[number] = open_regular(path)
                    with contextlib.suppress(OSError):  # others' files may only be read
                        os.utime(opened[number])  # what is read stays longest
                at = header_nbytes + row * self.row_nbytes + within
                if not _read_whole(opened[number], piece, at):
                    raise CheckpointError(f"{path} has ended early")
        except OSError as error:
            read.sink.failed(read_error(error, path))
        except MxError as error:
            read.sink.failed(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the read has to end
            read.sink.failed(unexpected(error))
        else:
            read.sink.done()
        finally:
            for fd in opened.values():
                close_file(fd)


def _read_whole(fd: int, piece: Piece, at: int) -> bool:
    view, done = piece.view, 0
    assert isinstance(view, memoryview)  # it is of the host
    while done < len(view):
        count = os.preadv(fd, [view[done:]], at + done)
        if not count:
            return False
        done += count
    return True
