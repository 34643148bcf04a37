"""Installed libraries of kernels: what tells their builds apart, and what their fatbins have.

The section .nv_fatbin of a library is a row of fatbins: a header each, then entries of machine code
(ELF) and PTX for several GPUs. The format has no public specification: what is read here was
compared with libraries of CUDA 12.8 to 13.0, and anything else is refused.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from mx.errors import ConfigError
from mx.graphs.package import Library

Buffer = bytes | memoryview

_MAX_SECTIONS = 100_000  # a cubin has some for each kernel
_MAX_NOTES = 1 << 20
_MAX_VERSION_FILE = 1 << 16
_NOTE_BUILD_ID = 3
_FATBIN = ".nv_fatbin"
_VERSION = re.compile(r"^__version__ = '([0-9A-Za-z.+]{1,64})'$", re.MULTILINE)


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
        raise ConfigError(f"{path} is not a 64-bit library") from error


@lru_cache(64)  # the largest have a gigabyte of kernels
def _identified(path: Path, nbytes: int, _changed: int) -> Library:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        build_id, fatbin = "", blake3()
        with memoryview(data) as view:
            for name, section in _sections(view):
                begin, length = section[4], section[5]
                if name == ".note.gnu.build-id":
                    build_id = _build_id(data[begin : begin + min(length, _MAX_NOTES)])
                elif name == _FATBIN:
                    with view[begin : begin + length] as kernels:
                        fatbin.update(kernels)
    if not build_id:
        raise ConfigError(f"{path} has no build id, which tells it from other builds")
    return Library(path.name, build_id, fatbin.digest(), _version(path))


def _version(path: Path) -> str:
    """Return the version of torch if a library is of its folder `torch/lib`."""
    beside = path.parent.parent / "version.py"
    if path.parent.name != "lib" or beside.parent.name != "torch" or not beside.is_file():
        return ""
    with beside.open(encoding="utf-8", errors="replace") as file:
        found = _VERSION.search(file.read(_MAX_VERSION_FILE))
    return found[1] if found else ""


def _sections(data: Buffer) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the sections of a 64-bit ELF: name, and what its header says (Elf64_Shdr).

    Raises:
        ValueError, struct.error, IndexError: It is none.
    """
    if bytes(data[:5]) != b"\x7fELF\x02":
        raise ValueError
    (at,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if count > _MAX_SECTIONS:
        raise ValueError
    found = [struct.unpack_from("<IIQQQQII", data, at + size * i) for i in range(count)]
    names = found[names_index][4]
    for section in found:
        yield _text(data, names + section[0]), section


def _text(data: Buffer, at: int) -> str:
    return bytes(data[at : at + 4096]).split(b"\0")[0].decode(errors="replace")


def _build_id(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name_bytes, value_bytes, kind = struct.unpack_from("<III", notes, at)
        value_at = at + 12 + (name_bytes + 3) // 4 * 4
        if kind == _NOTE_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[value_at : value_at + value_bytes].hex()
        at = value_at + (value_bytes + 3) // 4 * 4
    return ""


# -- fatbins ---------------------------------------------------------------------------------------

_MAGIC = 0xBA55ED50
_ELF_ENTRY = 2
#: An entry is compressed, in any way; by zstd.
_PACKED, _ZSTD = 1 << 13 | 1 << 15, 1 << 15
_MOST_EXPANDED = 1 << 28
#: Sections of memory that kernels, or the host, may write and that lasts from launch to launch.
_LASTING = (".nv.global", ".nv.constant3")
#: What compilers and CUDA's own functions put there and never write: text, and tables.
_CONSTANTS = re.compile(
    r"\$str(\$\d+)?|__unnamed_\d+|__cudart_\w+|__cr_\w+|precalc_xorwow_\w+|mrg32k3aM\w+"
)
#: Objects of no state, of a byte each, in every file that includes these.
_EMPTY = re.compile("4cuda3std|6thrust|4cute")


def fatbins(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the fatbins of a library: the offset in its section, and the bytes.

    Raises:
        ConfigError: It can't be read, or has fatbins of another format.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            with memoryview(data) as view:
                found = [s for name, s in _sections(view) if name == _FATBIN]
            for section in found:
                at, end = section[4], section[4] + section[5]
                while at + 16 <= end:
                    magic, _, header_bytes, nbytes = struct.unpack_from("<IHHQ", data, at)
                    if magic == _MAGIC:
                        whole = header_bytes + nbytes
                        yield at - section[4], data[at : at + whole]
                        at += whole
                    elif magic:
                        raise ValueError
                    at += 0 if magic else 8
    except OSError as error:
        raise ConfigError(f"the library {path} can't be read: {error.strerror}") from error
    except (struct.error, ValueError, IndexError) as error:
        raise ConfigError(f"{path} has kernels in a form that mx does not know") from error


def read_fatbin(path: Path, offset: int, nbytes: int) -> bytes:
    """Return bytes of a library's section .nv_fatbin. The library has been identified.

    Raises:
        OSError: It can't be read.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        with memoryview(data) as view:
            begin = next(s[4] for name, s in _sections(view) if name == _FATBIN)
        return data[begin + offset : begin + offset + nbytes]


def state_of(fatbin: bytes, capability: int) -> str:
    """Return what lasts from launch to launch of a fatbin's kernels: the name of a variable.

    Args:
        fatbin: The fatbin.
        capability: The GPU's compute capability, times ten.

    Returns:
        "" if there is none.

    Raises:
        ValueError: That can't be told; the message says why.
    """
    at, seen = 16, False
    while at + 64 <= len(fatbin):
        kind, header_bytes, nbytes, packed = struct.unpack_from("<H2xIQI", fatbin, at)
        (arch,) = struct.unpack_from("<I", fatbin, at + 28)
        flags, _, expanded = struct.unpack_from("<QQQ", fatbin, at + 40)
        if header_bytes < 64 or at + header_bytes + nbytes > len(fatbin):
            raise ValueError("it is in a form that mx does not know")
        if kind == _ELF_ENTRY and arch // 10 == capability // 10 and arch <= capability:
            body = fatbin[at + header_bytes : at + header_bytes + nbytes]
            if (flags & _PACKED and not flags & _ZSTD) or expanded > _MOST_EXPANDED:
                raise ValueError("it is compressed in a way that mx does not know")
            if flags & _ZSTD:
                body = _zstd(body[: packed or nbytes], expanded)
            try:
                name = _variable(body)
            except (struct.error, IndexError, ValueError):
                raise ValueError("it is in a form that mx does not know") from None
            if name:
                return name
            seen = True
        at += header_bytes + nbytes
    if not seen:
        raise ValueError(f"it has no machine code for sm_{capability}")
    return ""


def _variable(cubin: bytes) -> str:
    """Return the name of a variable in lasting memory, "" if there is none."""
    sections = list(_sections(cubin))
    lasting = [name.startswith(_LASTING) for name, _ in sections]
    if not any(lasting):
        return ""
    (at, nbytes, strings), *_ = [(s[4], s[5], s[6]) for _, s in sections if s[1] == 2]
    begin = sections[strings][1][4]
    for place in range(at, at + nbytes, 24):
        name_at, info, index, size = struct.unpack_from("<IBxH8xQ", cubin, place)
        if info & 15 != 3 and 0 < index < len(sections) and lasting[index]:  # 3: a section itself
            name = _text(cubin, begin + name_at)
            if not (_CONSTANTS.fullmatch(name) or (size == 1 and _EMPTY.search(name))):
                return name
    return ""


def _zstd(data: bytes, nbytes: int) -> bytes:
    try:
        decompress = ctypes.CDLL("libzstd.so.1").ZSTD_decompress
    except OSError:
        raise ValueError("it is compressed, and there is no libzstd.so.1") from None
    decompress.restype = ctypes.c_size_t
    made = ctypes.create_string_buffer(nbytes)
    given = (made, ctypes.c_size_t(nbytes), data, ctypes.c_size_t(len(data)))
    if decompress(*given) != nbytes:
        raise ValueError("it is damaged")
    return made.raw
