"""Kernels of installed libraries: found by doing the work that loads them, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from mx.core.variant import Difference
from mx.cuda.device import CudaStream, Device
from mx.cuda.graphs import GraphCalls
from mx.graphs.libraries import identify
from mx.graphs.package import Library, LibraryCall
from mx.records import record


@record(frozen=True, slots=True)
class EagerCall:
    """Work that makes a library load kernels, such as a matrix product of certain shapes.

    `name` is the same in all processes. `run` is given a stream, a CUstream as an int, and queues
    the work there; it is called twice, the second time while the stream is captured. `library` is
    the file whose kernels they are.
    """

    name: str
    library: Path
    run: Callable[[int], None]


@record(frozen=True, slots=True)
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
