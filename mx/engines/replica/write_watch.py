"""Notices what an engine writes to its weights without announcing it."""

from __future__ import annotations

import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mx.engines.replica.prints import Prints
from mx.engines.replica.tensors import ParameterSlot, slots_of

#: How often samples of the weights are compared, and the part of a core that this may take.
_WATCH_S, _WATCH_PART = 1.0, 0.01


class WriteWatch:
    """Watches a model's weights for calls of its `load_weights`, and for samples that differ from
    before. `end` it: its thread ends then."""

    def __init__(self, log: logging.Logger) -> None:
        """
        Args:
            log: The engine's.
        """
        self._log = log
        self._slots: Mapping[str, ParameterSlot] = {}
        self._prints: Prints | None = None
        self._over = threading.Event()

    def begin(self, slots: Mapping[str, ParameterSlot]) -> None:
        """Take the weights as they are now.

        Args:
            slots: The weights'.
        """
        self._slots, self._prints = slots, Prints(slots)

    def renew(self) -> None:
        """Take the weights as they are now, after an announced change."""
        self._prints = Prints(self._slots)

    def follow(
        self, model: torch.nn.Module, look: Callable[[], None], written: Callable[[str], None]
    ) -> None:
        """Watch a model from now on.

        Args:
            model: The model, as the engine computes with it.
            look: Called again and again, on a thread, to compare.
            written: Called with what was noticed before something writes.
        """
        if not self._slots:
            found = slots_of(model, non_persistent=False)
            self.begin({name: slot for name, slot in found.items() if slot.parameter})
        _watch_load_weights(model, written)
        threading.Thread(target=self._look, args=(look,), name="mx-watch", daemon=True).start()

    def _look(self, look: Callable[[], None]) -> None:
        wait_s = _WATCH_S
        while not self._over.wait(wait_s):
            began_s = time.monotonic()
            look()
            wait_s = max(_WATCH_S, (time.monotonic() - began_s) / _WATCH_PART)

    def written(self, *, devices: bool) -> str:
        """Return what was written since, or "".

        Args:
            devices: As for `Prints.written`.
        """
        try:
            return "" if self._prints is None else self._prints.written(devices=devices)
        except Exception as error:  # noqa: BLE001 - the engine frees memory as it likes
            return f"its weights can't be read any more: {error}"

    def end(self) -> None:
        """Watch no longer, and refer to no weights any more."""
        self._over.set()
        self._slots, self._prints = {}, None


def _watch_load_weights(model: Any, written: Callable[[str], None]) -> None:
    """Replace a model's `load_weights` by one that calls `written` before it writes."""
    original = getattr(model, "load_weights", None)
    if original is None:
        return
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    def load_weights(itself: Any, *arguments: Any, **named: Any) -> Any:
        if itself is model:
            written("the model's `load_weights` was called")
        elif function is not None:  # a copy, with weights of its own
            return function(itself, *arguments, **named)
        return original(*arguments, **named)

    model.load_weights = types.MethodType(load_weights, model)  # of a copy it is the copy's
