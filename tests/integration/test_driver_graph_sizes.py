"""Packages of CUDA graphs of several sizes and at several addresses, over the stand-in driver."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mx.graphs import Package, combine, join
from mx.graphs.message import Capture, decode
from tests.support.driver.layer_programs import runs, written
from tests.support.driver.logs import calls
from tests.support.driver.programs import each_major_at_leisure

pytestmark = [pytest.mark.integration, each_major_at_leisure]

#: Where a package is for, too: beside the usual place.
SECOND = 0x6200_0000_0000
_folders: list[Any] = []

_EXPORT = """
from tests.support.driver.sizes import *
with mx.graphs.region(REGION_BYTES, base={base}, decoys={decoys}) as region:
    sizes = Sizes(region)
    for n in {sizes}:
        capture = sizes.export(n, multiplies if n == {multiplies} else None)
        Path({folder!r}, f"{decoys}-{{n:03}}").write_bytes(capture.to_bytes())
"""


def _package(
    major: int, folder: Path, sizes: list[int], *, base: int | None = None, multiplies: int = 0
) -> Package:
    """Capture sizes in two processes, and return their package."""
    captures = []
    for decoys in (False, True):
        given = {"base": base, "decoys": decoys, "sizes": sizes, "multiplies": multiplies}
        runs(major, _EXPORT.format(folder=str(folder), **given))
        files = [folder / f"{decoys}-{n:03}" for n in sizes]
        captures.append([Capture.from_bytes(file.read_bytes()) for file in files])
    return join(combine(*each) for each in zip(*captures, strict=True))


@functools.cache
def _two(major: int, base: int | None = None) -> Package:
    """Return the package of two sizes, made once for each process."""
    with tempfile.TemporaryDirectory() as folder:
        return _package(major, Path(folder), [96, 40], base=base)


_RESTORES = """
from tests.support.driver.sizes import *
folder = Path({folder!r})
read = lambda digest: (folder / digest).read_bytes()
def restored(name="graph", **given):
    message = (folder / name).read_bytes()
    return mx.graphs.restore_all(message, read, **dict(pin="pin-1") | given)
def expected(*sizes, x=8):
    with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:  # the engine's own memory
        eager = Sizes(own)
        return {{n: eager.eager(n, vector(x)) for n in sizes}}
def proved(graph, n, right):
    x = vector(8)[: 4 * n]
    return graph.prove({{"x": x}}, {{"out": right[n], "copy": right[n]}})
engine = stream()
def launched(graph, n, x=9):
    call("cuMemcpyHtoD", graph.inputs()["x"].address, vector(x), 4 * n)
    assert graph.launch(int(engine))
    call("cuStreamSynchronize", engine)
    return fetch(graph.outputs()["copy"].address, 4 * n)
"""
_TWO = """
right, later = expected(96, 40), expected(96, 40, x=9)
with restored() as graphs:
    print(*graphs, *[graph.state.value for graph in graphs.values()])
    fill_weights(graphs.values())
    large, small = graphs.values()
    kv = small.work()["kv"]
    print(kv.nbytes == KV_BYTES, not any(fetch(kv.address, kv.nbytes)))
    print(proved(large, 96, right), proved(small, 40, right))
    print(launched(large, 96) == later[96], launched(small, 40) == later[40])
    print(launched(small, 40) == later[40], launched(large, 96) == later[96])
    small.close()
    print(launched(large, 96) == later[96], small.tensors(), large.state.value)
print(mx.graphs.counts())
"""


def test_sizes_compute_in_another_process(major: int, tmp_path: Path) -> None:
    """Bit for bit as the engine does; with one of them closed the other one goes on."""
    package = _two(major)
    one, other = decode(package.graph)
    assert (one.name, other.name) == ("decode.96", "decode.40")
    assert other.topology == one.topology == 0 and other.edges is one.edges
    assert len(package.images) == 2
    log = tmp_path / "log"
    log.mkdir()
    folder = written(package, tmp_path)
    lines = runs(major, _RESTORES.format(folder=str(folder)) + _TWO, LOG=log, REUSE_ADDRESSES=True)
    assert lines == [
        "decode.96 decode.40 restored restored",
        "True True",
        "True True",
        "True True",
        "True True",
        "True {} launched",
        "{'restored': 2, 'proved': 2, 'launched': 2}",
    ]
    # One raw graph, and images that are loaded once: the eager work of `expected` has its own.
    made = [name for name, _ in calls(log)]
    assert made.count("cuGraphCreate") == made.count("cuGraphDestroy") == 1
    assert made.count("cuGraphKernelNodeSetParams") == 2
    executables = sum(name.startswith("cuGraphInstantiate") for name in made)
    assert executables == made.count("cuGraphExecDestroy") == 2


_MANY = """
from dataclasses import replace
from mx.graphs.message import decode, encode
graphs = decode((folder / "graph").read_bytes())
kernels = [replace(k, name="lost") if k.name == "matvec" else k for k in graphs[0].kernels]
graphs = [replace(graph, kernels=tuple(kernels)) for graph in graphs]
wrong = [replace(each, digest=bytes(32)) for each in graphs[20].outputs]
graphs[20] = replace(graphs[20], outputs=tuple(wrong))
(folder / "spoiled").write_bytes(encode(*graphs))
sizes = [int(graph.name.removeprefix("decode.")) for graph in graphs]
right, later = expected(*sizes), expected(*sizes, x=9)
right[sizes[40]] = bytes(4 * sizes[40])
with restored("spoiled") as found:
    fill_weights(found.values())
    for n in sizes:
        proved(found[f"decode.{n}"], n, right)
    good = [n for n in sizes if found[f"decode.{n}"].reason is None]
    print(len(good), all(launched(found[f"decode.{n}"], n) == later[n] for n in good))
    for index in (10, 20, 40):
        graph = found[f"decode.{sizes[index]}"]
        print(graph.state.value, graph.launch(int(engine)), graph.reason)
"""


def test_three_of_64_sizes_fail(major: int, tmp_path: Path) -> None:
    """By a kernel that is absent, by the golden inputs, by others: each says so, 61 run."""
    package = _package(major, tmp_path, list(range(33, 97)), multiplies=43)
    topologies = [graph.topology for graph in decode(package.graph)]
    assert len(topologies) == 64 and set(topologies) == {0, 10} and topologies.count(10) == 1
    folder = written(package, tmp_path)
    lines = runs(major, _RESTORES.format(folder=str(folder)) + _MANY, REUSE_ADDRESSES=True)
    assert lines == [
        "61 True",
        "refused False kernel: lost is not in its image",
        "refused False golden: a replay gives other bytes of the output out",
        "refused False unseen: a replay gives other bytes of the output out",
    ]


_FIRST_FAILS = """
from dataclasses import replace
right = expected(96, 40)
with restored() as found:
    fill_weights(found.values())
    large, small = found.values()
    print(large.reason, small.reason, proved(small, 40, right))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("cuGraphAddKernelNode:2:CUDA_ERROR_UNKNOWN", "driver: cuGraphAddKernelNode"),
        ("cuGraphInstantiateWithFlags:1:CUDA_ERROR_UNKNOWN", "driver: cuGraphInstantiate"),
    ],
)
def test_the_first_size_fails(major: int, tmp_path: Path, fault: str, says: str) -> None:
    """The next one of its topology does not need it."""
    folder = written(_two(major), tmp_path)
    code = _RESTORES.format(folder=str(folder)) + _FIRST_FAILS
    line = runs(major, code, FAIL=fault, REUSE_ADDRESSES=True)[-1]
    assert line.startswith(says) and line.endswith("None True")


@pytest.mark.long
def test_a_node_that_can_not_be_set_spoils_no_other_size(major: int, tmp_path: Path) -> None:
    folder = written(_two(major), tmp_path)
    code = _RESTORES.format(folder=str(folder)) + _FIRST_FAILS.replace("small, 40", "large, 96")
    fault = "cuGraphKernelNodeSetParams:1:CUDA_ERROR_UNKNOWN"
    line = runs(major, code, FAIL=fault, REUSE_ADDRESSES=True)[-1]
    assert line.startswith("None driver: cuGraphKernelNodeSetParams") and line.endswith("True")


_BASES = """
right = expected(96, 40)
def tries(name, **given):
    with restored(**given) as found:
        reasons = {str(graph.reason) for graph in found.values()}
        bases = {graph.tensors()["norm.weight"].address >> 40 for graph in found.values()
                 if graph.tensors()}
        fill_weights(found.values())
        done = [proved(graph, n, right) for graph, n in zip(found.values(), (96, 40))]
        print(json.dumps([name, list(found), sorted(bases), sorted(reasons), done]))
tries("free")
with mx.graphs.region(REGION_BYTES) as taken:
    tries("second")
    with mx.graphs.region(REGION_BYTES, base=[taken.base, SECOND]) as other:
        assert other.base == SECOND
        tries("taken")
        tries("given", regions=[other])
with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:
    tries("elsewhere", regions=[own])
"""


def test_a_package_is_for_the_first_addresses_that_are_free(major: int, tmp_path: Path) -> None:
    package = join([_two(major), _two(major, SECOND)])
    assert [graph.topology for graph in decode(package.graph)] == [0] * 4
    code = _RESTORES.format(folder=str(written(package, tmp_path))) + f"SECOND = {SECOND}" + _BASES
    said = {name: rest for name, *rest in map(json.loads, runs(major, code, REUSE_ADDRESSES=True))}
    names = ["decode.96", "decode.40"]
    assert said["free"] == [names, [0x60], ["None"], [True, True]]
    assert said["second"] == said["given"] == [names, [0x62], ["None"], [True, True]]
    for name in ("taken", "elsewhere"):
        _, bases, (reason,), done = said[name]
        assert not bases and done == [False] * len(done) and reason.startswith("occupied: ")
        assert "0x600000000000" in reason and "0x620000000000" in reason


_TOLD = """
for given in (dict(work=dict(kv=KV_BYTES)), dict(work=dict(kv=8192)), dict(work=dict(v=8192))):
    with restored(**given) as found:
        print(*{str(graph.reason) for graph in found.values()})
"""


def test_work_memory_of_another_size_is_refused(major: int, tmp_path: Path) -> None:
    code = _RESTORES.format(folder=str(written(_two(major), tmp_path))) + _TOLD
    assert runs(major, code, REUSE_ADDRESSES=True) == [
        "None",
        "environment: work memory kv: '65.5 kB' there, '8.19 kB' here",
        "environment: work memory v: '0 B' there, '8.19 kB' here",
    ]


def test_memory_is_asked_for_before_it_is_taken(major: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    folder = written(_two(major), tmp_path)
    code = _RESTORES.format(folder=str(folder)) + _TOLD
    (line, *_) = runs(major, code, LOG=log, MEMORY_BYTES=64 << 20)
    assert line.startswith("memory: the graphs' memory needs 4.19 MB on cuda:GPU-")
    assert "more than the 0 B free of 67.1 MB" in line
    assert not {"cuMemCreate", "cuModuleLoadData"} & set(dict(calls(log)))


def test_a_size_is_not_proved_once_another_one_runs(major: int, tmp_path: Path) -> None:
    """A proof writes into memory that the engine uses by then."""
    code = """
right = expected(96, 40)
with restored() as found:
    fill_weights(found.values())
    large, small = found.values()
    print(proved(large, 96, right), len(launched(large, 96)))
    kept = launched(large, 96)
    print(proved(small, 40, right), small.reason)
    print(fetch(large.outputs()["copy"].address, 4 * 96) == kept)
"""
    folder = written(_two(major), tmp_path)
    assert runs(major, _RESTORES.format(folder=str(folder)) + code, REUSE_ADDRESSES=True) == [
        "True 384",
        "False other: another graph was launched: prove all of a package before",
        "True",
    ]


def test_one_graph_is_asked_for_where_there_are_several(major: int, tmp_path: Path) -> None:
    code = (
        _RESTORES.format(folder=str(written(_two(major), tmp_path)))
        + """
with mx.graphs.restore((folder / "graph").read_bytes(), read, pin="pin-1") as graph:
    print(graph.state.value, graph.reason)
with restored(pin="another") as found:
    print(*[graph.reason.cause.value for graph in found.values()], dict(found)["decode.40"].name)
with mx.graphs.restore_all((folder / "graph").read_bytes(), {}.__getitem__, pin="pin-1") as found:
    print(*[graph.reason.cause.value for graph in found.values()], *found["decode.40"].tensors())
for message in (b"", b"x"):
    with mx.graphs.restore_all(message, read) as found:
        print(*found, *[graph.reason.cause.value for graph in found.values()])
"""
    )
    assert runs(major, code, REUSE_ADDRESSES=True) == [
        "refused other: the package has 1 more: use `restore_all`",
        "pin pin decode.40",
        "image image norm.weight gate.weight up.weight",
        " malformed",
        " malformed",
    ]
