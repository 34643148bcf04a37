"""Weights that arrive in memory, in the form in which transformers reads a safetensors file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from mx.api.target import Pull
from mx.core.types import DTYPE_BITS
from mx.errors import MxError
from mx.memory.tensors import torch_form
from mx.transport import DeviceView, View

if TYPE_CHECKING:
    import torch


class Weights:
    """One pull's tensors by name; each waits for its layer. Thread-safe; `close` it.

    The tensors outlive it: they are views of the pull's memory, which is a private writable map of
    the cache's memory where that could be attached.
    """

    def __init__(self, pull: Pull) -> None:
        """
        Args:
            pull: The pull, which the weights close.

        Raises:
            MxError: The pull failed before its manifest was there.
        """
        self.failure: MxError | None = None
        self.pull = pull
        self._lock = threading.RLock()
        self._layers: dict[int, dict[str, torch.Tensor]] = {}
        layout = pull.wait_manifest().layout
        self.kinds = {t.name: (t.dtype, t.shape) for t in layout.tensors}
        self._layer_of = {t.name: t.layer for t in layout.tensors}
        for alias in layout.aliases:
            self.kinds[alias.name] = (alias.dtype, alias.shape)
            self._layer_of[alias.name] = self._layer_of[alias.target]

    def told(self) -> _Told:
        """Return a context that records an error of the pull as `failure`, and lets it through."""
        return _Told(self)

    @property
    def packed(self) -> bool:
        """True if tensors have dtypes that torch has not, and so come as bytes."""
        return any(
            DTYPE_BITS[dtype] < 8 and torch_form(dtype, shape)[0] is torch.uint8
            for dtype, shape in self.kinds.values()
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, once its layer has arrived.

        Raises:
            MxError: The pull failed.
        """
        layer = self._layer_of[name]
        with self._lock, self.told():
            if layer not in self._layers:
                self._layers[layer] = self.pull.layer_state_dict(layer)
            return self._layers[layer][name]

    def ready(self) -> None:
        """Wait for the end of the pull.

        Raises:
            MxError: The pull failed.
        """
        with self.told():
            self.pull.wait()

    def memory(self) -> range:
        """Return the addresses of the pull's memory, once it has ended; empty for a GPU's
        memory."""
        view: View = self.pull.memory()
        if isinstance(view, DeviceView) or not isinstance(view, memoryview) or not view.nbytes:
            return range(0)
        from mx.buffers import address_of

        begin = address_of(view)
        return range(begin, begin + view.nbytes)

    def close(self) -> None:
        """Close the pull. Idempotent."""
        with self._lock:
            self._layers.clear()
        self.pull.close()


class _Told:
    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MxError):
            self._weights.failure = error


class WeightsFile:
    """What `safetensors.safe_open` returns, for weights that are not a file."""

    def __init__(self, weights: Weights, finished: Callable[[], None] | None) -> None:
        """
        Args:
            weights: The weights.
            finished: Called at the end of the `with` block.
        """
        self._weights = weights
        self._finished = finished

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._finished is not None:
            self._finished()

    def keys(self) -> list[str]:
        """Return the tensors' names."""
        return list(self._weights.kinds)

    def offset_keys(self) -> list[str]:
        """Return the tensors' names in the order of their layers."""
        return self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def metadata(self) -> dict[str, str]:
        """Return a file's metadata."""
        return {"format": "pt"}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, once its layer is here."""
        return self._weights.tensor(name)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""
        return {name: self._weights.tensor(name) for name in self._weights.kinds}

    def get_slice(self, name: str) -> WeightsSlice:
        """Return a tensor's slices, which wait for the tensor when they are taken."""
        return WeightsSlice(self._weights, name)


class WeightsSlice:
    """A tensor of which shape and dtype are known, and whose values are waited for."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._weights = weights
        self._name = name

    def get_shape(self) -> list[int]:
        """Return the tensor's shape."""
        return list(self._weights.kinds[self._name][1])

    def get_dtype(self) -> str:
        """Return the tensor's dtype, as safetensors names it."""
        return self._weights.kinds[self._name][0]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._weights.tensor(self._name)[index]
