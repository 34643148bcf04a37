"""The child process of a trial: replays variants of a graph, and says what memory is afterwards."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import load
from mx.cuda.vmm import FIXED_BYTES
from mx.graphs.addresses import inside
from mx.graphs.build import Template
from mx.graphs.calls import GraphCalls
from mx.graphs.functions import Functions, library_differences, mapped_libraries
from mx.graphs.message import decode
from mx.graphs.package import GraphPlace, RegionSpec
from mx.graphs.region import Region
from mx.units import MIB, align_up

_PIECE_BYTES = 16 * MIB
_GUARD = 0xA5
#: Above a region. Below it is a piece of the least size that has an address of one's own.
_GUARD_BYTES = 2 * MIB


def main(folder: str) -> None:
    """Do what the job in a folder says. Each replay writes a byte as it begins. What fails is the
    last line of standard error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    told = os.dup(1)
    os.dup2(2, 1)  # what calls print is no replay
    try:
        _Replays(Path(folder), told).run()
    except Exception as error:  # noqa: BLE001 - the parent is told, and refuses the graph
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)  # not waiting for a context that a kernel may have broken


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)


class _Replays:
    def __init__(self, folder: Path, told: int) -> None:
        self._told = told
        self._folder, self._job = folder, json.loads((folder / "job").read_text())
        (self._graph,) = decode((folder / "graph-0").read_bytes())

    def run(self) -> None:
        graph, ends = self._graph, contextlib.ExitStack()
        device = ends.enter_context(Device.open(load(), self._job["device"]))
        regions = [ends.enter_context(Region(s.nbytes, s.base, device)) for s in graph.regions]
        guards = [ends.enter_context(Region(n, at, device)) for at, n in guards_of(graph.regions)]
        libraries = [*mapped_libraries(), *map(Path, self._job["libraries"])]
        driver = GraphCalls()
        with device.current(), CudaStream(device) as stream:
            module, _, name = self._job["calls"].partition(":")
            calls = getattr(importlib.import_module(module), name)() if module else ()
            if found := library_differences(graph, libraries, calls):
                raise RuntimeError(f"another library than the captures': {found[0].field}")
            paths = {path.name: path for path in libraries}
            functions = Functions(driver, device, graph, self._image, paths, calls, ends)
            expected: dict[int, bytes] = {}
            for variant in range(self._job["variants"]):
                (made,) = decode((self._folder / f"graph-{variant}").read_bytes())
                template = Template(driver, made, functions.of, device.context)
                executable = template.instantiate(made)
                for given in range(1 + self._job["inputs"]):
                    os.write(self._told, b".")
                    self._reset(regions, guards, given)
                    driver.replay(executable, stream.handle)
                    stream.synchronize()
                    if variant == given == 0:
                        self._require_golden(regions)
                    _require_guards(guards)
                    digest = _digest(regions)
                    if expected.setdefault(given, digest) != digest:
                        raise RuntimeError("memory differs afterwards")

    def _image(self, digest: str) -> bytes:
        return (self._folder / digest).read_bytes()

    def _reset(self, regions: Sequence[Region], guards: Sequence[Region], given: int) -> None:
        for region in regions:
            region.clear([(0, region.nbytes)])
        for guard in guards:
            guard.clear([(0, guard.nbytes)], _GUARD)
        with (self._folder / "weights").open("rb") as file:
            for place in self._graph.weights:
                regions[place.region].write(place, file.read(place.nbytes))
        if not given:
            for each in self._graph.inputs:
                regions[each.place.region].write(each.place, each.value)
            return
        with (self._folder / f"input-{given}").open("rb") as file:
            for each in self._graph.inputs:
                place = each.place
                regions[place.region].write(place, file.read(place.nbytes))

    def _require_golden(self, regions: Sequence[Region]) -> None:
        for output in self._graph.outputs:
            found = regions[output.place.region].read(output.place)
            if blake3(found).digest() != output.digest:
                raise RuntimeError("the trial's weights or libraries are not those of the captures")


def guards_of(regions: Sequence[RegionSpec]) -> list[tuple[int, int]]:
    """Return (base, nbytes) of the memory around regions that a trial guards."""
    found: dict[int, int] = {}
    for region in regions:
        found.setdefault(align_up(region.base + region.nbytes, FIXED_BYTES), _GUARD_BYTES)
    found |= {region.base - FIXED_BYTES: FIXED_BYTES for region in regions}
    return [(base, nbytes) for base, nbytes in found.items() if not inside(base, regions)]


def _digest(regions: Sequence[Region]) -> bytes:
    found = blake3()
    for region in regions:
        for offset in range(0, region.nbytes, _PIECE_BYTES):
            nbytes = min(_PIECE_BYTES, region.nbytes - offset)
            found.update(region.read(GraphPlace("", 0, offset, nbytes, "U8", (nbytes,))))
    return found.digest()


def _require_guards(guards: Sequence[Region]) -> None:
    for guard in guards:
        place = GraphPlace("", 0, 0, guard.nbytes, "U8", (guard.nbytes,))
        if guard.read(place) != bytes([_GUARD]) * guard.nbytes:
            raise RuntimeError(f"memory outside the region was written, near {guard.base:#x}")
