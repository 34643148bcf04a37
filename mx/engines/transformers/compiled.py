"""Compiles a model's forward, with compile caches from peers, once its weights have arrived."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from typing import Any

import torch

from mx import artifacts, config
from mx.engines.compiling import CompileCaches
from mx.engines.replica.keys import short
from mx.engines.transformers.arrival import Loading

log = logging.getLogger(__name__)


def configuration_of(model: Any) -> str:
    """Return the properties of a model that shape its compiled code, as words "part=value"."""
    said = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):
        said.pop(name, None)
    attention = getattr(model.config, "_attn_implementation", None)
    device = model.device.type
    return (
        f"class={type(model).__name__} config={short(said)} dtype={model.dtype} "
        f"attention={attention} device={device}"
    )


def compile_forward(model: Any, loading: Loading, name: str, settings: config.Settings) -> None:
    """Replace a model's forward by one that is compiled at its first call, which waits for all
    weights.

    Args:
        model: The model, of which the forward is replaced.
        loading: The arrival of its weights.
        name: The model's name, for which sets of compile caches are looked for.
        settings: Settings of mx; without `trust` there are no caches.
    """
    fields = {"engine": "transformers", "configuration": configuration_of(model)}
    caches: CompileCaches | None = None
    if config.recording() is not None:
        artifacts.note(fields)
    elif settings.trust:
        caches = CompileCaches("transformers", log, name, settings, fields)
        weakref.finalize(model, caches.close)
    # Of the class, and the model by a weak reference: it goes with its last user.
    reference, plain = weakref.ref(model), type(model).forward
    compiled: Any = torch.compile(plain, options=None if caches is None else caches.options)
    waits: list[Loading] = [loading]

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        if waits:
            waits[0].wait()
        found = compiled(reference(), *given, **named)
        if waits:
            waits.clear()
            if caches is not None:
                caches.compiled()
        return found

    forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    model.forward = forward
