"""A model whose module makes a tensor when it is imported, as some of vLLM's own do."""

from __future__ import annotations

import torch
from vllm.model_executor.models.llama import LlamaForCausalLM

SCALE = torch.tensor(1.5)


class LlamaWithTensor(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama whose logits are scaled."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        return None if logits is None else logits * SCALE
