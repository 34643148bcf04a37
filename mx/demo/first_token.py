"""What the demo shows of an engine: the first token of a model that computes while it arrives."""

from __future__ import annotations

import gc
import importlib.util
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: How fast the source sends, as over a link of 2 Gbit/s.
RATE = "250MB/s"
PROMPT = 64


@dataclass(frozen=True)
class FirstToken:
    """When a model that arrives gives its first token: after all weights, or while they come."""

    sequential_s: float
    progressive_s: float
    same: bool


def generates(checkpoint: Path) -> bool:
    """Return True if a checkpoint is a model of transformers, which is installed, that generates
    text."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return False
    try:
        named = json.loads((checkpoint / "config.json").read_bytes())["architectures"]
        return str(named[0]).endswith(("ForCausalLM", "LMHeadModel"))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def measure(name: str, coordinator: str) -> FirstToken:
    """Compute a model's first token when all weights are here, and at once.

    Args:
        name: The model's name; its source should send at most `RATE`.
        coordinator: HOST:PORT.

    Returns:
        The times, and whether the tokens are equal.

    Raises:
        MxError: As `mx.engines.transformers.load`.
    """
    import torch

    logits, seconds = [], []
    for wait in (True, False):
        began_s = time.monotonic()
        model, loading = _load(name, coordinator)
        if wait:
            loading.wait()
        with torch.no_grad():
            prompt = torch.arange(PROMPT)[None] % model.config.get_text_config().vocab_size
            logits.append(model(prompt).logits[:, -1].clone())
        seconds.append(time.monotonic() - began_s)
        loading.wait()
        del model, loading
        gc.collect()  # its memory is needed for the next one
    return FirstToken(seconds[0], seconds[1], torch.equal(logits[0], logits[1]))


def _load(name: str, coordinator: str) -> tuple[Any, Any]:
    from mx.engines.transformers import load, loading

    model = load(name, coordinator=coordinator, transport="tcp")
    return model, loading(model)
