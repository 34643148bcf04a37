"""What tells installed libraries apart: their build ids, and their kernels' bytes."""

from __future__ import annotations

import mmap
import struct
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from mx.errors import ConfigError
from mx.graphs.package import Library

_MAX_SECTIONS = 10_000
_MAX_NOTES = 1 << 20
_NOTE_BUILD_ID = 3


def identify(path: Path) -> Library:
    """Return what tells a library from its other builds.

    Args:
        path: Its file, an ELF of 64 bits.

    Raises:
        ConfigError: It can't be read, or has no build id.
    """
    try:
        status = path.stat()
        return _identified(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ConfigError(f"the library {path} can't be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is no library of 64 bits") from error


@lru_cache(64)  # the largest have a gigabyte of kernels
def _identified(path: Path, nbytes: int, _changed: int) -> Library:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError
        (at,) = struct.unpack_from("<Q", data, 40)
        size, count, names_index = struct.unpack_from("<HHH", data, 58)
        if count > _MAX_SECTIONS:
            raise ValueError
        sections = [struct.unpack_from("<IIQQQQ", data, at + size * i) for i in range(count)]
        names = sections[names_index]
        build_id, fatbin = "", blake3()
        for section in sections:
            begin, length = section[4], section[5]
            name_at = names[4] + section[0]
            name = data[name_at : data.find(b"\0", name_at)]
            if name == b".note.gnu.build-id":
                build_id = _build_id(data[begin : begin + min(length, _MAX_NOTES)])
            elif name == b".nv_fatbin":
                with memoryview(data) as view, view[begin : begin + length] as kernels:
                    fatbin.update(kernels)
    if not build_id:
        raise ConfigError(f"{path} has no build id, which tells it from other builds")
    return Library(path.name, build_id, fatbin.digest())


def _build_id(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, value_bytes, kind = struct.unpack_from("<III", notes, at)
        value_at = at + 12 + (name_bytes + 3) // 4 * 4
        if kind == _NOTE_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[value_at : value_at + value_bytes].hex()
        at = value_at + (value_bytes + 3) // 4 * 4
    return ""
