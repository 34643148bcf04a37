"""Loads a model's weights on a thread, which puts each layer's tensors in place as they arrive."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mx import runtime
from mx.api.target import Pull
from mx.core.progress import Progress
from mx.engines.transformers.pending import Pending, Values
from mx.errors import ClosedError, ConfigError, MxError, another
from mx.fetching.report import LayerEvent, PullReport

#: What ends the thread that follows a pull: the pull's end, or the model's.
_END = None


class Loading:
    """The arrival of a model's weights: what `loading(model)` returns.

    It ends by itself once all weights have arrived, the pull has failed, or the model is gone.
    """

    def __init__(self, running: Pull, model: Any, values: Values) -> None:
        """
        Args:
            running: The pull of the weights, which this closes at its end.
            model: The model, with pending tensors.
            values: The values that those tensors wait for.
        """
        self._pull = running
        self._values = values
        self._places = _PendingTensors(model)
        self._queue: queue.SimpleQueue[LayerEvent | None] = queue.SimpleQueue()
        self._report: PullReport | None = None
        # A queue that may be put to in the middle of anything, as a finalizer runs.
        self._finalizer = weakref.finalize(model, self._queue.put, _END)
        self._finalizer.atexit = False
        values.building = False
        self._thread = threading.Thread(target=self._follow, name="mx-loading", daemon=True)
        runtime.opened(self)
        self._thread.start()

    def __repr__(self) -> str:
        """One line: the model and how far it is."""
        return f"<Loading of {self._pull!r}>"

    # -- what users ask ---------------------------------------------------------------------------

    def wait(self, timeout_s: float | None = None) -> PullReport:
        """Block until every weight is in its place.

        Args:
            timeout_s: Seconds to wait at most; None waits without a limit.

        Returns:
            The report of the pull.

        Raises:
            TimeoutError: Some have not arrived after `timeout_s`. Loading goes on.
            MxError: The error that ended the pull, see `mx.pull`.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._values.changed:
            while self._report is None:
                if self._values.error is not None:
                    raise another(self._values.error)
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError("the weights are still arriving")
                self._values.changed.wait(left_s)
            return self._report

    @property
    def report(self) -> PullReport | None:
        """The report of the pull; None until every weight is in its place, or if it failed."""
        return self._report

    def progress(self) -> Progress:
        """Return a snapshot of the pull's progress.

        Raises:
            ForkError: This process was forked from the one that loads.
        """
        return self._pull.progress()

    def on_layer(self, callback: Callable[[LayerEvent], None]) -> None:
        """Call `callback` for each layer as soon as it has arrived, as `Pull.on_layer` does."""
        self._pull.on_layer(callback)

    def close(self) -> None:
        """Stop loading, if it still runs. What has not arrived raises ClosedError when it is used.
        Idempotent."""
        self._queue.put(_END)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def forked(self) -> None:
        """Mark it as closed, in a forked child."""
        self._values.forked(runtime.fork_error())

    # -- the thread -------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Put each layer's tensors in their places, until the pull or the model ends."""
        report: PullReport | None = None
        try:
            self._pull.on_layer(self._queue.put)
            self._pull.on_end(lambda: self._queue.put(_END))
            while self._places.missing and (event := self._queue.get()) is not _END:
                self._places.fill(event.tensors(), self._values)
            if self._places.missing:
                self._pull.close()  # ends what still runs, then `wait` says why
                self._pull.wait()
                raise ClosedError("the model was closed before its weights had arrived")
            report = self._pull.wait()
        except BaseException as error:  # noqa: BLE001 - raised in those that wait
            self._values.failed(runtime.unexpected(error))
        finally:
            self._places.clear()
            self._finalizer.detach()
            with contextlib.suppress(MxError):  # a fork, or an exit, closes it too
                self._pull.close()
            runtime.closed(self)
        with self._values.changed:
            self._report = report
            # All has arrived: what is still waited for is no parameter and no buffer.
            self._values.error = self._values.error or _homeless()
            self._values.changed.notify_all()


def _homeless() -> MxError:
    return ConfigError(
        "the model computes with a tensor that is neither a parameter nor a buffer of it",
        hint="load it by `from_pretrained`",
    )


class _PendingTensor:
    """The places where one pending tensor is registered, and how many tensors it still waits
    for."""

    __slots__ = ("entries", "flat", "missing", "pending")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.missing = len(pending.mx_value.needs)
        #: A module's parameters or buffers by name, and the name in them.
        self.entries: list[tuple[dict[str, Any], str]] = []
        #: Recurrent modules, which keep a list of their parameters as well.
        self.flat: list[weakref.ref[Any]] = []

    def made(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the plain parameter or buffer that replaces the pending tensor."""
        pending = self.pending
        found: torch.Tensor = pending.mx_value.make(tensors)
        if getattr(pending, "_is_param", False):
            found = torch.nn.Parameter(found.detach(), requires_grad=pending.requires_grad)
        for name, value in pending.__dict__.items():
            if name not in ("mx_value", "mx_values", "_is_param"):  # what transformers noted on it
                setattr(found, name, value)
        return found

    def put(self, tensor: torch.Tensor) -> None:
        """Replace the pending tensor in the places that still hold it."""
        for entries, name in self.entries:
            if entries.get(name) is self.pending:
                entries[name] = tensor
        for module in filter(None, (reference() for reference in self.flat)):
            module._flat_weights = [
                tensor if each is self.pending else each for each in module._flat_weights
            ]


class _PendingTensors:
    """The places of a model's pending tensors. It does not keep the model alive."""

    def __init__(self, model: Any) -> None:
        places: dict[int, _PendingTensor] = {}
        for module in model.modules():
            for entries in (module._parameters, module._buffers):
                for name, tensor in entries.items():
                    if isinstance(tensor, Pending):
                        place = places.setdefault(id(tensor), _PendingTensor(tensor))
                        place.entries.append((entries, name))
            for tensor in module.__dict__.get("_flat_weights", ()):
                if isinstance(tensor, Pending) and id(tensor) in places:
                    places[id(tensor)].flat.append(weakref.ref(module))
        self.missing = len(places)
        self._here: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, list[_PendingTensor]] = {}
        for place in places.values():
            for name in place.pending.mx_value.needs:
                self._waiting.setdefault(name, []).append(place)

    def fill(self, tensors: Mapping[str, torch.Tensor], values: Values) -> None:
        """Take tensors that have arrived, and fill the places that wait for no other."""
        self._here.update(tensors)
        ready = []
        for name in tensors:
            for place in self._waiting.pop(name, ()):
                place.missing -= 1
                if not place.missing:
                    ready.append(place)
        with torch.no_grad():
            made = [(place, place.made(self._here)) for place in ready]
        with values.changed:
            for place, tensor in made:
                tensor.requires_grad_(place.pending.requires_grad)  # it may have changed since
                place.pending.mx_value.settle(tensor)
                place.put(tensor)
            self.missing -= len(made)
            values.changed.notify_all()

    def clear(self) -> None:
        """Release everything."""
        self._here.clear()
        self._waiting.clear()
