"""Runs programs with the kernels of `layer` over the stand-in."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from mx.graphs.merge import Package, combine
from mx.graphs.message import Capture
from tests.support.driver import programs
from tests.support.driver.build import kernels_library
from tests.support.driver.kernels import Image
from tests.support.libraries import COUNTER, cubin, fatbin

#: `layer` reads it: where the cubins are, by kernel's name.
IMAGES = "MX_TEST_GRAPH_IMAGES"
_folders: list[Any] = []


@functools.cache
def prepared(capability: int = 90) -> tuple[Path, Path]:
    """Return the folder of the kernels' cubins, and the library that runs them."""
    from tests.support.driver.decode import images
    from tests.support.driver.tails import images as tails
    from tests.support.driver.torch_like import image as torch_like

    made, more = images(capability), tails(capability)
    fat = _fatbins(made, capability) | {"torch": torch_like()}
    (add,) = (image for image in made if image.name == "add")
    made += (_renamed(add, "ncclDevKernel_Sum"),)
    folder = tempfile.TemporaryDirectory(prefix="mx-standin-")
    _folders.append(folder)
    for image in made:
        Path(folder.name, f"{image.name}.cubin").write_bytes(image.cubin)
    Path(folder.name, "tails").mkdir()
    for image in more:
        Path(folder.name, "tails", f"{image.name}.cubin").write_bytes(image.cubin)
    Path(folder.name, "fatbins").mkdir()
    for name, image in fat.items():
        Path(folder.name, "fatbins", name).write_bytes(image.cubin)
    return Path(folder.name), kernels_library(capability, (*made, *more, *fat.values()))


def _fatbins(images: Iterable[Image], capability: int) -> dict[str, Image]:
    """Return `add` in fatbins: in two, in one of a module that has state, and `norm` by its name,
    by what they are called."""
    named = {image.name: image for image in images}
    add, norm = named["add"], named["norm"]
    ptx = norm.ptx.replace(".entry norm(", ".entry add(")
    # The stand-in knows images by their bytes, from the first on.
    return {
        "one": replace(add, cubin=fatbin(add.cubin, arch=capability)),
        "other": replace(add, cubin=fatbin(add.cubin, add.cubin, arch=capability)),
        "state": replace(add, cubin=fatbin(cubin(COUNTER, "counter"), arch=capability)),
        "parameters": Image("add", fatbin(norm.cubin, arch=capability), ptx),
    }


def _renamed(image: Image, name: str) -> Image:
    """Return a kernel by another name, as if it were another library's."""
    ptx = image.ptx.replace(f".entry {image.name}(", f".entry {name}(")
    return Image(name, name.encode() + image.cubin, ptx)


_PRELUDE = """
import json
from pathlib import Path
import mx.graphs
from mx.graphs import Cause, State
from tests.support.driver.layer import *

gpu = use()
"""


def runs(major: int, code: str, **settings: object) -> list[str]:
    """Run a program that has all names of `layer`, and return its output's lines.

    Args:
        major: The major version of CUDA.
        code: The program; it has to succeed.
        **settings: Settings of the stand-in.
    """
    capability = int(str(settings.get("COMPUTE_CAPABILITY", 90)))
    folder, library = prepared(capability)
    with mock.patch.dict("os.environ", {IMAGES: str(folder)}):
        return programs.passes(major, _PRELUDE + code, KERNELS=library, **settings)


#: Captures the layer, and writes what it captured to `{out}`. What stands for a name in braces is
#: replaced by `exported`.
_EXPORT = """
with mx.graphs.region(REGION_BYTES, decoys={decoys}) as region:
    layer = Layer(region)
    kernels = layer.kernels
    weights = values(1)
    layer.fill(weights, vector(7))
    {before}
    graph = layer.capture({more})
    try:
        capture = mx.graphs.export(
            graph,
            region,
            weights=layer.weights(),
            inputs={{"x": layer.tensors["x"]}},
            outputs={{"out": layer.tensors["out"], "copy": layer.tensors["copy"]}},
            images={images},
            libraries={libraries},
            calls={calls},
            pin="pin-1",
        )
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
    else:
        Path({out!r}).write_bytes(capture.to_bytes())
        print("exported")
"""


def export(
    major: int,
    out: Path,
    *,
    decoys: bool = False,
    first: str = "",
    before: str = "",
    more: str = "",
    images: str = "kernels.given()",
    libraries: str = "()",
    calls: str = "()",
    **settings: object,
) -> str:
    """Capture the layer in a process of its own, and return what it says: "exported" or an error.

    Args:
        major: The major version of CUDA.
        out: The file for the capture.
        decoys: Capture it as the second process does.
        first: Lines to run before the region is opened.
        before: Lines to run before the capture.
        more: More work of the graph, as functions of a stream.
        images: The images that are given.
        libraries: The files of libraries that are given.
        calls: The eager calls that are given.
        **settings: Settings of the stand-in.
    """
    code = first + _EXPORT.format(
        out=str(out),
        decoys=decoys,
        before=before,
        more=more,
        images=images,
        libraries=libraries,
        calls=calls,
    )
    return runs(major, code, **settings)[-1]


def captures_of(major: int, folder: Path, **changes: object) -> tuple[Capture, Capture]:
    """Capture the layer in two processes."""
    captures = []
    for decoys in (False, True):
        out = folder / f"capture-{decoys}"
        assert export(major, out, decoys=decoys, **changes) == "exported"  # type: ignore[arg-type]
        captures.append(Capture.from_bytes(out.read_bytes()))
    return (captures[0], captures[1])


def package_of(major: int, folder: Path, **changes: object) -> Package:
    """Capture the layer in two processes, and return the package."""
    return combine(*captures_of(major, folder, **changes))


def written(package: Package, folder: Path) -> Path:
    """Write a package into a folder: the message, and images by their hashes."""
    (folder / "graph").write_bytes(package.graph)
    for digest, image in package.images.items():
        (folder / digest).write_bytes(image)
    return folder


@functools.cache
def packaged(major: int) -> Path:
    """Return a folder with the layer's package, made once for each process."""
    folder = tempfile.TemporaryDirectory(prefix="mx-standin-")
    _folders.append(folder)
    path = Path(folder.name)
    return written(package_of(major, path), path)
