"""Kernels of installed libraries: found by doing the work that loads them, once."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from mx.core.variant import Difference
from mx.cuda.device import CudaStream, Device
from mx.cuda.graphs import GraphCalls
from mx.errors import ConfigError
from mx.graphs.package import Library, LibraryCall


@dataclass(frozen=True, slots=True)
class EagerCall:
    """Work that makes a library load kernels, such as a matrix product of certain shapes.

    `name` is the same in all processes. `run` is given a stream, a CUstream as an int, and queues
    the work there; it is called twice, the second time while the stream is captured. `library` is
    the file whose kernels they are.
    """

    name: str
    library: Path
    run: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LaunchedFunction:
    """A function that a call launched."""

    call: str
    function: int
    name: str


def identified(calls: Sequence[EagerCall]) -> tuple[list[Library], list[LibraryCall]]:
    """Return the libraries of calls, and the calls as a graph names them.

    Raises:
        ConfigError: A library can't be told from its other builds.
    """
    libraries: dict[Library, int] = {}
    named = []
    for call in calls:
        index = libraries.setdefault(identify(call.library), len(libraries))
        named.append(LibraryCall(call.name, index))
    return list(libraries), named


def loaded_by(driver: GraphCalls, device: Device, call: EagerCall) -> list[LaunchedFunction]:
    """Make a call and return the functions that it launches.

    Raises:
        CudaError: The driver fails.
        Exception: What the call raises.
    """
    with device.current(), CudaStream(device) as stream:
        call.run(stream.handle)
        stream.synchronize()
        driver.capture_begin(stream.handle)
        try:
            call.run(stream.handle)
        finally:
            graph = driver.capture_end(stream.handle)
        try:
            launched = [
                driver.launch_of(node).function
                for node in driver.nodes(graph)
                if driver.node_kind(node) == "KERNEL"
            ]
            return [
                LaunchedFunction(call.name, function, driver.function_name(function))
                for function in dict.fromkeys(launched)
            ]
        finally:
            driver.graph_destroy(graph)


def library_differences(
    theirs: Sequence[Library], calls: Sequence[LibraryCall], ours: Sequence[EagerCall]
) -> list[Difference]:
    """Return where the libraries that load a graph's kernels differ from those here.

    Args:
        theirs: The graph's libraries.
        calls: The graph's calls.
        ours: The calls of this process.
    """
    known = {call.name: call for call in ours}
    found = []
    for call in calls:
        library = theirs[call.library]
        mine = known.get(call.name)
        if mine is None:
            found.append(Difference(f"call {call.name}", library.name, ""))
            continue
        here = identify(mine.library)
        for field in ("build_id", "fatbin"):
            one, other = getattr(library, field), getattr(here, field)
            if one != other:
                texts = [each if isinstance(each, str) else each.hex() for each in (one, other)]
                found.append(Difference(f"{library.name} {field}", *texts))
    return list(dict.fromkeys(found))


# -- what tells installed libraries apart ----------------------------------------------------------

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
        raise ConfigError(f"{path} is not a 64-bit library") from error


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
