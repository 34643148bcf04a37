"""Finds the functions of a graph's kernels in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from mx.core.variant import Difference
from mx.cuda.device import Device
from mx.cuda.errors import CudaError
from mx.graphs.bounds import COMPARED, SETTABLE
from mx.graphs.calls import GraphCalls
from mx.graphs.eager import EagerCall, LaunchedFunction, loaded_by
from mx.graphs.libraries import identify, read_fatbin
from mx.graphs.package import Graph, Image, Kernel
from mx.graphs.states import Cause, refuse


def mapped_libraries() -> list[Path]:
    """Return the shared libraries that this process has mapped."""
    found: dict[str, None] = {}
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        path = line.split(maxsplit=5)[5:]
        if path and ".so" in path[0]:
            found.setdefault(path[0])
    return [Path(each) for each in found]


def library_differences(
    graph: Graph, libraries: Sequence[Path], calls: Sequence[EagerCall]
) -> list[Difference]:
    """Return where the libraries that a graph's kernels are of differ from those here.

    Args:
        graph: The graph.
        libraries: Files of libraries of this process.
        calls: The calls of this process.

    Raises:
        ConfigError: A library can't be read, or has no build id.
    """
    paths = {path.name: path for path in libraries}
    known = {call.name: call.library for call in calls}
    needed = [(each.name, each.library, known.get(each.name)) for each in graph.calls]
    found = [
        Difference(f"call {n}", graph.libraries[i].name, "") for n, i, path in needed if not path
    ]
    pairs = [(index, path) for _, index, path in needed if path]
    for index in dict.fromkeys(each.library for each in graph.fatbins):
        name = graph.libraries[index].name
        if name in paths:
            pairs.append((index, paths[name]))
        else:
            found.append(Difference(f"library {name}", name, ""))
    for index, path in pairs:
        theirs, here = graph.libraries[index], identify(path)
        for field in ("build_id", "fatbin"):
            one, other = getattr(theirs, field), getattr(here, field)
            if one != other:
                texts = [each if isinstance(each, str) else each.hex() for each in (one, other)]
                found.append(Difference(f"{theirs.name} {field}", *texts))
    return list(dict.fromkeys(found))


def checked_image(get_image: Callable[[str], bytes], image: Image) -> bytes:
    """Return the bytes of an image, which have its hash.

    Raises:
        Refusal: It is absent, or has other bytes.
    """
    digest = image.digest.hex()
    try:
        data = bytes(get_image(digest))
    except Exception as error:  # noqa: BLE001 - it is the caller's, and a reason
        refuse(Cause.IMAGE, f"{digest} is not there: {type(error).__name__}: {error}")
    if len(data) != image.nbytes or blake3(data).digest() != image.digest:
        refuse(Cause.IMAGE, f"the image {digest} has other bytes than its hash says")
    return data


class Functions:
    """The functions of kernels in this process, each found when it is first asked for.

    What a kernel is not found for is raised again for each graph that has it: the others can be
    used. The device's context is current.
    """

    def __init__(
        self,
        driver: GraphCalls,
        device: Device,
        graph: Graph,
        get_image: Callable[[str], bytes],
        libraries: Mapping[str, Path],
        calls: Sequence[EagerCall],
        loaded: contextlib.ExitStack,
    ) -> None:
        """
        Args:
            driver: The calls.
            device: The GPU.
            graph: A graph, whose kernels they are and whose libraries are those of this process.
            get_image: Returns an image by its blake3 in hexadecimal.
            libraries: The files of its libraries, by name.
            calls: The calls of this process; each that is needed is made once, and captured once
                more.
            loaded: Where what unloads modules is added.
        """
        self._driver, self._device, self._graph = driver, device, graph
        self._get_image, self._libraries, self._loaded = get_image, libraries, loaded
        self._calls = {call.name: call for call in calls}
        self._made: dict[object, Any] = {}

    def of(self, kernel: int) -> int:
        """Return the function of a kernel, by its index.

        Raises:
            Refusal: It is absent, there twice, or has other parameters or attributes; or its image
                is absent or has other bytes.
            CudaError: The driver fails.
            OSError: A library can't be read.
            Exception: What a call raises.
        """
        return int(self._once(self._found, kernel))

    def _once(self, make: Callable[[int], Any], index: int) -> Any:
        if (make, index) not in self._made:
            try:
                self._made[make, index] = make(index)
            except Exception as error:
                self._made[make, index] = error
                raise
        if isinstance(made := self._made[make, index], Exception):
            raise made.with_traceback(None)
        return made

    def _found(self, index: int) -> int:
        driver, graph, kernel = self._driver, self._graph, self._graph.kernels[index]
        if kernel.image is not None:
            function = _of_image(driver, self._once(self._module, kernel.image), kernel.name)
        elif kernel.fatbin is not None:
            library = self._once(self._library, kernel.fatbin)
            function = driver.library_function(library, kernel.name)
            if not function:
                refuse(Cause.KERNEL, f"{kernel.name} is not in its library's fatbin")
        else:
            assert kernel.call is not None
            launched = self._once(self._launched, kernel.call)
            several = {each.function for each in launched if each.name == kernel.name}
            if len(several) != 1:
                what = "loads two kernels of that name" if several else "does not load it"
                refuse(
                    Cause.KERNEL,
                    f"{kernel.name}: the call {graph.calls[kernel.call].name} {what}",
                )
            (function,) = several
        _check(driver, kernel, function)
        return function

    def _module(self, index: int) -> int:
        image = checked_image(self._get_image, self._graph.images[index])
        module = self._driver.module_load(image)
        self._loaded.callback(self._driver.module_unload, module)
        return module

    def _library(self, index: int) -> int:
        fatbin = self._graph.fatbins[index]
        path = self._libraries[self._graph.libraries[fatbin.library].name]
        library = self._driver.library_load(read_fatbin(path, fatbin.offset, fatbin.nbytes))
        self._loaded.callback(self._driver.library_unload, library)
        return library

    def _launched(self, index: int) -> list[LaunchedFunction]:
        return loaded_by(self._driver, self._device, self._calls[self._graph.calls[index].name])


def _of_image(driver: GraphCalls, module: int, name: str) -> int:
    try:
        return driver.module_function(module, name)
    except CudaError as error:
        if error.code == "CUDA_ERROR_NOT_FOUND":
            refuse(Cause.KERNEL, f"{name} is not in its image")
        raise


def _check(driver: GraphCalls, kernel: Kernel, function: int) -> None:
    # The driver reads as many bytes as the kernel has parameters, whatever it is given.
    if found := differences(driver, kernel, function):
        refuse(Cause.KERNEL, f"{kernel.name} has {found} here, other than the graph's")
    here = dict(driver.function_attributes(function, SETTABLE))
    for attribute, value in kernel.attributes:
        if attribute in SETTABLE and here.get(attribute, value) != value:
            driver.set_function_attribute(function, attribute, value)


def differences(driver: GraphCalls, kernel: Kernel, function: int) -> str:
    """Return what differs between a kernel and a function of this process, "" if nothing does.

    Raises:
        CudaError: The driver fails.
    """
    found = driver.parameters(function)
    if found != kernel.parameters:
        return f"{len(found)} parameters"
    theirs = {each: value for each, value in kernel.attributes if each in COMPARED}
    for attribute, value in driver.function_attributes(function, theirs):
        if theirs[attribute] != value:
            return f"the attribute {attribute} as {value}"
    return ""
