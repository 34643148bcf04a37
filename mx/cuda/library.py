"""Imports the library that calls the driver."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from mx.cuda.errors import CudaUnavailableError


def import_driver() -> ModuleType:
    """Return the module `cuda.bindings.driver`.

    Raises:
        CudaUnavailableError: It can't be imported, or there is no NVIDIA driver.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        # WSL has only /dev/dxg; a container that has GPUs has one of these.
        if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia"))):
            raise CudaUnavailableError("there is no NVIDIA driver, and so no CUDA, here") from None
        raise CudaUnavailableError(
            f"cuda-bindings can't be imported: {error}",
            hint="in a clone of mx: pip install '.[cuda13]' ('.[cuda12]' for a driver of CUDA 12)",
        ) from error
