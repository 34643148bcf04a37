"""Where the kernels of a captured graph come from: images, fatbins of libraries, eager calls."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from mx.cuda.device import Device
from mx.cuda.driver import DeviceAttribute
from mx.cuda.errors import CudaError
from mx.graphs.addresses import GraphRefusedError
from mx.graphs.bounds import FUNCTION_ATTRIBUTES
from mx.graphs.calls import GraphCalls
from mx.graphs.eager import EagerCall, loaded_by
from mx.graphs.functions import differences
from mx.graphs.libraries import fatbins, identify, read_fatbin, state_of
from mx.graphs.package import Fatbin, Image, Kernel, Library, LibraryCall

#: Kernels that talk to other processes, whose state is in no region.
_COMMUNICATES = re.compile("nccl|nvshmem", re.IGNORECASE)


class Sources:
    """Finds kernels by the functions that a graph launches, and keeps what is found.

    `images` are those that travel, by their blake3. The context of the device is current.
    """

    def __init__(
        self,
        driver: GraphCalls,
        device: Device,
        images: Mapping[int, bytes],
        libraries: Sequence[Path],
        calls: Sequence[EagerCall],
    ) -> None:
        self.images: dict[bytes, bytes] = {}
        self._driver, self._device, self._given = driver, device, images
        self._paths, self._calls = libraries, calls
        self._kernels: list[Kernel] = []
        self._functions: dict[int, int] = {}  # the index of the kernel
        self._libraries: dict[Library, int] = {}
        self._named: dict[LibraryCall, int] = {}
        self._fatbins: dict[Fatbin, int] = {}

    def found(
        self,
    ) -> tuple[tuple[Image, ...], tuple[Library, ...], tuple[LibraryCall, ...], tuple[Kernel, ...]]:
        """Return the images, libraries, calls and kernels of the functions so far."""
        images = tuple(Image(digest, len(image)) for digest, image in self.images.items())
        return images, tuple(self._libraries), tuple(self._named), tuple(self._kernels)

    def fatbins(self) -> tuple[Fatbin, ...]:
        """Return the fatbins of the functions so far."""
        return tuple(self._fatbins)

    def kernel(self, at: int, function: int) -> tuple[int, Kernel]:
        """Return the kernel of a function that node `at` launches, and its index.

        Raises:
            GraphRefusedError: It can't travel.
            ConfigError: A library can't be read, or has no build id.
            CudaError: The driver fails.
        """
        index = self._functions.get(function)
        if index is None:
            index = self._functions[function] = len(self._kernels)
            self._kernels.append(self._new(at, function))
        return index, self._kernels[index]

    def _new(self, at: int, function: int) -> Kernel:
        name = self._driver.function_name(function)
        what, parameters = f"node {at}, kernel {name}", self._driver.parameters(function)
        if _COMMUNICATES.search(name):
            raise GraphRefusedError(
                f"{what}: it talks to other processes, and does not travel",
                hint="capture a graph between the collectives",
            )
        image = self._given.get(function)
        if image is not None:
            digest = blake3(image).digest()
            self.images.setdefault(digest, bytes(image))
            return Kernel(name, list(self.images).index(digest), None, parameters)
        attributes = self._driver.function_attributes(function, FUNCTION_ATTRIBUTES)
        fatbin = self._fatbin(what, Kernel(name, None, None, parameters, None, attributes))
        if fatbin is not None:
            index = self._fatbins.setdefault(fatbin, len(self._fatbins))
            return Kernel(name, None, None, parameters, index, attributes)
        call = self._loaded.get(function)
        if call is None:
            raise GraphRefusedError(
                f"{what}: its image is not at hand, no library has it, and no call loads it",
                hint="give its image, the file of its library, or an eager call that loads it",
            )
        made = LibraryCall(call.name, self._library(call.library))
        return Kernel(name, None, self._named.setdefault(made, len(self._named)), parameters)

    def _library(self, path: Path) -> int:
        return self._libraries.setdefault(identify(path), len(self._libraries))

    @cached_property
    def _loaded(self) -> dict[int, EagerCall]:
        """The calls by the functions that they launch: made where a kernel is nowhere else."""
        return {
            each.function: call
            for call in self._calls
            for each in loaded_by(self._driver, self._device, call)
        }

    @cached_property
    def _places(self) -> dict[str, list[tuple[Path, int, int]]]:
        """The fatbins of the libraries, as (path, offset, nbytes), by the names of kernels."""
        found = defaultdict(list)
        for path in self._paths:
            for offset, fatbin in fatbins(path):
                try:
                    library = self._driver.library_load(fatbin)
                except CudaError as error:
                    if error.code == "CUDA_ERROR_NO_BINARY_FOR_GPU":
                        continue
                    raise
                with contextlib.ExitStack() as ends:
                    ends.callback(self._driver.library_unload, library)
                    for name in self._driver.library_kernels(library):
                        found[name].append((path, offset, len(fatbin)))
        return found

    def _fatbin(self, what: str, kernel: Kernel) -> Fatbin | None:
        """Return the fatbin that a kernel is of, None if no library has one of its name."""
        places = self._places.get(kernel.name, [])
        alike = [each for each in places if self._is_of(kernel, *each)]
        if not places:
            return None
        if len(alike) != 1:
            many = f"{len(alike)} fatbins have it" if alike else "it has other attributes"
            raise GraphRefusedError(f"{what}: in its library {many}, so that it can't be told")
        path, offset, nbytes = alike[0]
        driver, ordinal = self._device.driver, self._device.ordinal
        major = driver.device_attribute(ordinal, DeviceAttribute.COMPUTE_CAPABILITY_MAJOR)
        minor = driver.device_attribute(ordinal, DeviceAttribute.COMPUTE_CAPABILITY_MINOR)
        try:
            variable = state_of(read_fatbin(path, offset, nbytes), 10 * major + minor)
        except ValueError as error:
            raise GraphRefusedError(f"{what}: the fatbin of its library: {error}") from None
        if variable:
            raise GraphRefusedError(
                f"{what}: its module has the variable {variable}, whose state would not travel",
                hint="capture the graph without this kernel",
            )
        return Fatbin(self._library(path), offset, nbytes)

    def _is_of(self, kernel: Kernel, path: Path, offset: int, nbytes: int) -> bool:
        """Return True if a fatbin's kernel has the parameters and attributes of a captured one."""
        library = self._driver.library_load(read_fatbin(path, offset, nbytes))
        with contextlib.ExitStack() as ends:
            ends.callback(self._driver.library_unload, library)
            function = self._driver.library_function(library, kernel.name)
            return not differences(self._driver, kernel, function)
