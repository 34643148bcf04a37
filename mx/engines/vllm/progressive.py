"""Processes modules of a model while the weights of others still arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mx.engines.replica.tensors import ParameterSlot


class EarlyProcessing:
    """Processes each module of a model that vLLM has built once its weights are there, so that
    little is left when the last ones arrive.

    Only linear layers and input embeddings whose tensors no other module has: what else vLLM
    processes may look at several modules.
    """

    def __init__(self, slots: Mapping[str, ParameterSlot], device: torch.device) -> None:
        """
        Args:
            slots: All of the model's that are filled, by name.
            device: Where the engine computes.
        """
        self._slots, self._device = slots, device
        self._missing: dict[torch.nn.Module, set[str]] = {}
        self._done: set[torch.nn.Module] = set()
        tensors: dict[int, set[torch.nn.Module]] = {}
        for name, slot in slots.items():
            self._missing.setdefault(slot.module, set()).add(name)
            tensors.setdefault(id(slot.get()), set()).add(slot.module)
        shared = {module for owners in tensors.values() if len(owners) > 1 for module in owners}
        for module in [each for each in self._missing if each in shared or not _by_itself(each)]:
            del self._missing[module]

    def arrived(self, names: Iterable[str]) -> None:
        """Process the modules that have all their weights by now.

        Args:
            names: Of the tensors that were filled since the last call.
        """
        for name in names:
            module = self._slots[name].module
            missing = self._missing.get(module)
            if missing is None:
                continue
            missing.discard(name)
            if not missing:
                del self._missing[module]
                self._process(module)

    def _process(self, module: Any) -> None:
        from vllm.model_executor.model_loader.utils import device_loading_context

        method = module.quant_method
        loads = getattr(method, "requires_device_loading", True)
        with device_loading_context(module, self._device) if loads else contextlib.nullcontext():
            method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()
        self._done.add(module)

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """Have vLLM, which processes all modules inside the block, leave out those that are."""
        methods: dict[int, Any] = {id(each.quant_method): each.quant_method for each in self._done}
        originals = {key: each.process_weights_after_loading for key, each in methods.items()}

        def left_out(method: Any) -> Any:
            original = originals[id(method)]
            return lambda layer: None if layer in self._done else original(layer)

        for method in methods.values():
            method.process_weights_after_loading = left_out(method)
        try:
            yield
        finally:
            for method in methods.values():
                del method.process_weights_after_loading


def _by_itself(module: Any) -> bool:
    """Return True if vLLM processes a module from its own tensors alone."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    method = getattr(module, "quant_method", None)
    return (
        isinstance(module, (LinearBase, VocabParallelEmbedding))
        and not isinstance(module, ParallelLMHead)  # vLLM may tie it first
        and isinstance(method, QuantizeMethodBase)
        and not getattr(method, "uses_meta_device", False)  # it processes what is loaded already
    )
