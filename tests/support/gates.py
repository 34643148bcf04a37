"""Lets layers into a model only when it waits for one: each is missing when it is first used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mx.engines.transformers import arrival, pending


class Gate:
    """The state of one gate. `waited` counts the waits for a value that was not here."""

    def __init__(self) -> None:
        self.waited = 0
        self._open = False
        self._waiting: set[pending.Value] = set()

    def open(self, loading: arrival.Loading) -> arrival.Loading:
        """Let the other layers in. Returns its argument."""
        with loading._values.changed:
            self._open = True
            loading._values.changed.notify_all()
        return loading

    def wait(self, values: pending.Values, value: pending.Value) -> Any:
        if value.here:
            return _WAIT(values, value)
        with values.changed:
            self.waited += 1
            self._waiting.add(value)
            values.changed.notify_all()
        try:
            return _WAIT(values, value)
        finally:
            with values.changed:
                self._waiting.discard(value)

    def fill(self, places: arrival._PendingTensors, tensors: Any, values: pending.Values) -> None:
        with values.changed:
            while not self._open and all(value.here for value in self._waiting):
                values.changed.wait()
        _FILL(places, tensors, values)


_WAIT, _FILL = pending.Values.wait, arrival._PendingTensors.fill


@contextmanager
def gate() -> Iterator[Gate]:
    """Make a gate for the models that are loaded in the block."""
    made = Gate()

    def wait(values: pending.Values, value: pending.Value) -> Any:
        return made.wait(values, value)

    def fill(places: arrival._PendingTensors, tensors: Any, values: pending.Values) -> None:
        made.fill(places, tensors, values)

    with (
        patch.object(pending.Values, "wait", wait),
        patch.object(arrival._PendingTensors, "fill", fill),
    ):
        yield made
