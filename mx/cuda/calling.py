"""Calls of cuda-bindings that return their results, or raise."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mx.cuda.errors import CudaError, cuda_error
from mx.cuda.library import import_driver


class DriverCalls:
    """Calls of `cuda.bindings.driver`, which return tuples of a CUresult and their results."""

    def __init__(self, module: ModuleType | None = None) -> None:
        """
        Args:
            module: What has the functions; by default it is imported.

        Raises:
            CudaUnavailableError: It can't be imported, or there is no NVIDIA driver.
        """
        self._d: Any = module or import_driver()

    def _call(self, name: str, *arguments: Any, detail: str = "") -> Any:
        function = getattr(self._d, name, None)
        if function is None:
            raise cuda_error(name, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "not in cuda-bindings")
        result, *values = function(*arguments)
        if int(result):
            raise self._error(name, result, detail)
        return values[0] if len(values) == 1 else values

    def _error(self, call: str, result: Any, detail: str) -> CudaError:
        # A result that is newer than the bindings has no name.
        code = getattr(result, "name", None) or f"CUresult {int(result)}"
        return cuda_error(call, code, self._text(self._d.cuGetErrorString(result)), detail)

    @staticmethod
    def _text(found: Any) -> str:
        result, text = found
        return "" if int(result) or not text else text.decode(errors="replace")
