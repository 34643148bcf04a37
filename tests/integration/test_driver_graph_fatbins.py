"""Kernels of installed libraries, found in their fatbins, over the stand-in driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mx.graphs import GraphRefusedError, combine
from mx.graphs.message import decode
from tests.support.driver.layer_programs import (
    captures_of,
    export,
    package_of,
    prepared,
    runs,
    written,
)
from tests.support.driver.logs import calls
from tests.support.driver.programs import each_major_at_leisure
from tests.support.libraries import fatbin, library

pytestmark = [pytest.mark.integration, each_major_at_leisure]

#: `add` is a library's, which has asked for more shared memory than a kernel has by itself.
_OF_LIBRARY = """
    data = (Path(os.environ["MX_TEST_GRAPH_IMAGES"]) / "fatbins" / {name!r}).read_bytes()
    owner = call("cuLibraryLoadData", data, [], [], 0, [], [], 0)
    add = call("cuKernelGetFunction", call("cuLibraryGetKernel", owner, b"add"))
    call("cuFuncSetAttribute", add, calling.driver.CUfunction_attribute(8), 64 << 10)
    kernels.functions["add"] = add
"""


def built(folder: Path, *names: str, build_id: str = "0xabcd") -> Path:
    """Return a library with fatbins of `prepared`, one behind the other."""
    folder.mkdir(exist_ok=True)
    data = [(prepared()[0] / "fatbins" / name).read_bytes() for name in names]
    # The first one is for other GPUs.
    return library(folder / "libone.so", build_id, bytes(8).join([fatbin(b"none"), *data]))


def given(path: Path, name: str = "one") -> dict[str, str]:
    """Return the arguments of a capture whose `add` is of a library."""
    return {
        "before": _OF_LIBRARY.format(name=name),
        "images": "kernels.given('norm', 'matvec')",
        "libraries": f"[Path({str(path)!r})]",
    }


_RESTORE = """
from dataclasses import replace
from mx.graphs.message import encode
folder = Path({folder!r})
message = (folder / "graph").read_bytes()
g = mx.graphs.decode(message)[0]

def restored(libraries, message=message):
    return mx.graphs.restore(
        message, lambda d: (folder / d).read_bytes(), pin="pin-1", libraries=map(Path, libraries)
    )

def tries(name, *given):
    with restored(*given) as graph:
        reason = graph.reason
    print(json.dumps([name, graph.reason.cause.value, reason.message]))

def kernel(**changes):
    kernels = [replace(k, **changes) if k.name == "add" else k for k in g.kernels]
    return encode(replace(g, kernels=tuple(kernels)))

tries("none", [])
tries("another build", [{other!r}])
tries("moved", [{moved!r}])
tries("attribute", [{path!r}], kernel(attributes=((0, 64),)))
tries("name", [{path!r}], kernel(name="sub"))
with restored([{path!r}]) as graph:
    weights = values(1)
    for each, tensor in graph.tensors().items():
        call("cuMemcpyHtoD", tensor.address, weights[each].tobytes(), tensor.nbytes)
    with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:
        eager = Layer(own)
        eager.fill(weights, vector(0))
        expected = eager.eager(vector(8))
    print(graph.prove({{"x": vector(8)}}, {{"out": expected, "copy": expected}}), graph.reason)
"""


def test_kernels_of_fatbins_need_no_capture(major: int, tmp_path: Path) -> None:
    path = built(tmp_path, "parameters", "one")
    package = package_of(major, tmp_path, **given(path))
    graph = decode(package.graph)[0]
    (add,) = (kernel for kernel in graph.kernels if kernel.name == "add")
    assert (
        add.fatbin == 0 and dict(add.attributes)[8] == 64 << 10 and dict(add.attributes)[0] == 128
    )
    assert graph.calls == () and len(package.images) == 2
    assert [each.build_id for each in graph.libraries] == ["abcd"]
    assert 0 < graph.fatbins[0].offset < graph.fatbins[0].nbytes + 20_000
    log = tmp_path / "log"
    log.mkdir()
    code = _RESTORE.format(
        folder=str(written(package, tmp_path)),
        path=str(path),
        other=str(built(tmp_path / "other", "one", build_id="0xef")),
        moved=str(built(tmp_path / "moved", "one", "parameters")),
    )
    *tried, proved = runs(major, code, LOG=log, REUSE_ADDRESSES=True)
    reasons = {name: (cause, message) for name, cause, message in map(json.loads, tried)}
    assert {name: cause for name, (cause, _) in reasons.items()} == {
        "none": "environment",
        "another build": "environment",
        "moved": "environment",
        "attribute": "kernel",
        "name": "kernel",
    }
    assert "library libone.so" in reasons["none"][1]
    assert "libone.so build_id" in reasons["another build"][1]
    assert "libone.so fatbin" in reasons["moved"][1]
    assert "the attribute 0 as 128" in reasons["attribute"][1]
    assert "sub is not in its library's fatbin" in reasons["name"][1]
    assert proved == "True None"
    made = [name for name, _ in calls(log)]
    assert "cuStreamBeginCapture" not in made and made.count("cuGraphInstantiateWithFlags") == 1
    assert made.count("cuLibraryLoadData") == made.count("cuLibraryUnload") == 3
    (told,) = log.glob("*.log")
    assert "cuFuncSetAttribute" in told.read_text()


@pytest.mark.parametrize(
    ("names", "loaded", "says"),
    [
        (["one", "other"], "one", "in its library 2 fatbins have it, so that it can't be told"),
        (["parameters"], "one", "in its library it has other attributes"),
        (["state"], "state", "its module has the variable counter"),
        ([], "one", "its image is not at hand, no library has it, and no call loads it"),
    ],
    ids=["two", "other parameters", "a writable global", "absent"],
)
def test_a_kernel_that_can_t_be_told_or_has_state_is_refused(
    major: int, tmp_path: Path, names: list[str], loaded: str, says: str
) -> None:
    path = built(tmp_path, *names)
    said = export(major, tmp_path / "out", **given(path, loaded))  # type: ignore[arg-type]
    assert said.startswith("GraphRefusedError: node ") and f"kernel add: {says}" in said


#: A kernel of torch's: its structure was garbage before.
_TORCH = """
    import struct
    from types import SimpleNamespace
    from tests.support.torch_structures import CLOSURE, closure
    data = (Path(os.environ["MX_TEST_GRAPH_IMAGES"]) / "fatbins" / "torch").read_bytes()
    owner = call("cuLibraryLoadData", data, [], [], 0, [], [], 0)
    kernel = call("cuLibraryGetKernel", owner, CLOSURE.encode())
    kernels.functions["torch"] = call("cuKernelGetFunction", kernel)
    places = [layer.address["copy"], layer.address["out"]]
    half = struct.pack("<f4x", 0.5)
    # Words that are no half of an address by chance.
    garbage = lambda n: b"".join(os.urandom(2) + bytes(2) for _ in range(n // 4 + 1))[:n]
    structure = closure([12, N // 12], places, SimpleNamespace(randbytes=garbage), half)
"""
_PROVES = """
folder = Path({folder!r})
with mx.graphs.restore(
    (folder / "graph").read_bytes(), lambda d: (folder / d).read_bytes(), pin="pin-1",
    libraries=[Path({path!r})],
) as graph:
    weights = values(1)
    for each, tensor in graph.tensors().items():
        call("cuMemcpyHtoD", tensor.address, weights[each].tobytes(), tensor.nbytes)
    with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:
        eager = Layer(own)
        eager.fill(weights, vector(0))
        out = eager.eager(vector(8))
    copy = (np.frombuffer(out, np.float32) + np.float32(0.5)).tobytes()
    print(graph.prove({{"x": vector(8)}}, {{"out": out, "copy": copy}}), graph.reason)
"""


def test_a_kernel_like_torchs_is_restored_without_a_capture(major: int, tmp_path: Path) -> None:
    """Its structure has dimensions that were never written. What is known of a release of torch is
    not known of another one."""
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (folder.parent / "version.py").write_text("__version__ = '2.11.0+cu130'\n")
    data = (prepared()[0] / "fatbins" / "torch").read_bytes()
    path = library(folder / "libtorch_cuda.so", "0xabcd", data)
    captures = captures_of(
        major,
        tmp_path,
        before=_TORCH,
        more='lambda s: kernels.launch(s, "torch", N, structure)',
        images="kernels.given('norm', 'matvec', 'add')",
        libraries=f"[Path({str(path)!r})]",
    )
    package = combine(*captures)
    graph = decode(package.graph)[0]
    assert [each.version for each in graph.libraries] == ["2.11.0+cu130"] and graph.tried == ()
    others = [
        replace(each, graph=replace(each.graph, libraries=(replace(library_of, version=""),)))
        for each in captures
        for library_of in each.graph.libraries
    ]
    with pytest.raises(GraphRefusedError, match="parameter 1 differs, and mx does not know"):
        combine(*others)
    log = tmp_path / "log"
    log.mkdir()
    code = _PROVES.format(folder=str(written(package, tmp_path)), path=str(path))
    assert runs(major, code, LOG=log) == ["True None"]
    assert "cuStreamBeginCapture" not in dict(calls(log))
