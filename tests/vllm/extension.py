"""A worker extension that writes weights as RL frameworks do, past vLLM's own calls."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from safetensors.torch import load_file


class Writes:
    """Methods that workers get, as `worker_extension_cls`."""

    model_runner: Any

    def write_weights(self, file: str, told: bool = False) -> None:
        """Write a checkpoint's weights into the model.

        Args:
            file: Of safetensors.
            told: Whether mx is told.
        """
        from mx.engines.vllm import changing

        with changing(self) if told else contextlib.nullcontext():
            self.model_runner.get_model().load_weights(load_file(file).items())

    def scale(self, name: str) -> None:
        """Multiply a weight by 1.5, below every call that could be wrapped."""
        with torch.no_grad():
            dict(self.model_runner.get_model().named_parameters())[name].data.mul_(1.5)
