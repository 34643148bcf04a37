"""What the demo shows of an engine: the first token of a model that computes while it arrives."""

from __future__ import annotations

import gc
import importlib.util
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx.units import GB

if TYPE_CHECKING:
    import torch

#: On the link of the demonstration a model takes this long.
LINK_S = 2.0
PROMPT = 512
#: How often each case is measured; models that are larger are measured once.
ROUNDS = 3
_ROUNDS_NBYTES = 4 * GB


@dataclass(frozen=True)
class FirstToken:
    """When a model that arrives gives its first token: after all weights, or while they come.

    The times are medians over `rounds`, in seconds since the call of `load`. `loaded_s` is when all
    weights were there, in the sequential case.
    """

    loaded_s: float
    sequential_s: float
    progressive_s: float
    rounds: int
    same: bool


def rate_of(nbytes: int) -> int:
    """Return the bytes per second of a link on which a model of this size takes `LINK_S`."""
    return max(1, round(nbytes / LINK_S))


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


def measure(name: str, coordinator: str, nbytes: int) -> FirstToken:
    """Compute a model's first token when all weights are here, and at once, alternately.

    It computes with one thread: with more, whatever else runs here decides how long that takes.

    Args:
        name: The model's name; its source should send as a link does.
        coordinator: HOST:PORT.
        nbytes: The model's size.

    Returns:
        The times, and whether the tokens are equal.

    Raises:
        MxError: As `mx.engines.transformers.load`.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(name, coordinator, ROUNDS if nbytes <= _ROUNDS_NBYTES else 1)
    finally:
        torch.set_num_threads(threads)


def _measure(name: str, coordinator: str, rounds: int) -> FirstToken:
    import torch

    _, expected, _ = _first(name, coordinator, waits=True)  # what torch does at first, for neither
    loaded_s, sequential_s, progressive_s = list[float](), list[float](), list[float]()
    same = True
    for _ in range(rounds):
        at_s, logits, first_s = _first(name, coordinator, waits=True)
        loaded_s.append(at_s)
        sequential_s.append(first_s)
        same &= torch.equal(logits, expected)
        _, logits, first_s = _first(name, coordinator, waits=False)
        progressive_s.append(first_s)
        same &= torch.equal(logits, expected)
    return FirstToken(
        statistics.median(loaded_s),
        statistics.median(sequential_s),
        statistics.median(progressive_s),
        rounds,
        same,
    )


def _first(name: str, coordinator: str, *, waits: bool) -> tuple[float, torch.Tensor, float]:
    """Load a model and compute; return when it began to, the logits, and when they were there."""
    import torch

    from mx.engines.transformers import load, loading

    began_s = time.monotonic()
    model: Any = load(name, coordinator=coordinator, transport="tcp")
    arriving = loading(model)
    if waits:
        arriving.wait()
    at_s = time.monotonic() - began_s
    with torch.no_grad():
        prompt = torch.arange(PROMPT)[None] % model.config.get_text_config().vocab_size
        logits: torch.Tensor = model(prompt).logits[:, -1].clone()
    first_s = time.monotonic() - began_s
    arriving.wait()
    del model, arriving
    gc.collect()  # its memory is needed for the next one
    return at_s, logits, first_s
