"""Imports the library that calls the driver."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType

from mx.cuda.errors import CudaUnavailableError
from mx.errors import install_hint

_BINDINGS = "cuda.bindings.driver"
_NO_DRIVER = "there is no NVIDIA driver, and so no CUDA, here"
_INSTALL = install_hint("cuda13", "cuda12")
# WSL has only /dev/dxg; a container that has GPUs has one of these.
_SIGNS = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")


def import_driver() -> ModuleType:
    """Return the module `cuda.bindings.driver`.

    Raises:
        CudaUnavailableError: It can't be imported, or there is no NVIDIA driver.
    """
    try:
        return importlib.import_module(_BINDINGS)
    except ImportError as error:
        if not any(map(os.path.exists, _SIGNS)):
            raise CudaUnavailableError(_NO_DRIVER) from None
        raise CudaUnavailableError(
            f"cuda-bindings can't be imported: {error}", hint=_INSTALL
        ) from error


@cache
def why_missing() -> str:
    """Return why there is no CUDA here, "" if there may be. Starts nothing, and imports nothing but
    the packages around the bindings. The first answer stays: each search takes 0.1 ms."""
    if not any(map(os.path.exists, _SIGNS)):
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return _NO_DRIVER
    try:
        found = importlib.util.find_spec(_BINDINGS)
    except ImportError:  # of the package around it
        found = None
    return "" if found is not None else f"cuda-bindings is not installed: {_INSTALL}"
