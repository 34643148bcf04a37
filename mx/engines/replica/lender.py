"""Lends what an engine's model holds, and withdraws it while the engine changes it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch

import mx
from mx.core.variant import ProcessingKey
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import LiveTensors, Slot, plain
from mx.errors import BindingError, MxError
from mx.log import event

log = logging.getLogger(__name__)

#: The reason of a change that leaves the tensors as they were.
ASLEEP = "sleep"


class _FailedError(Exception):
    """The engine's change of its weights failed."""


class Lender:
    """Lends one model's tensors. Its errors are logged, never raised: they must not stop an engine.

    Host tensors are lent where they are, and those of other devices as copies in host memory. Each
    is hashed first, on a thread of its own. `close` ends it. Thread-safe.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        name: str,
        key: ProcessingKey,
        options: LoaderOptions,
        *,
        revision: str = "",
        files: Path | None = None,
        before_processing: bool = False,
    ) -> None:
        """Begin to lend.

        Args:
            slots: Where the model has its tensors.
            name: The model's name.
            key: Its variant.
            options: The coordinator, and the bounds of what is given.
            revision: The revision to lend it as, "" for the default one.
            files: A folder with the model's configuration and tokenizer, to travel along.
            before_processing: Whether the engine is going to replace these tensors by others. Then
                they are copied, before this returns, and the copy ends with the engine's first
                change.
        """
        self.key = key
        self._name, self._revision, self._files = name, revision, files
        self._options, self._copied = options, before_processing
        self._live = LiveTensors(slots)
        self._tensors: Mapping[str, torch.Tensor] = self._live
        self._source: mx.Source | None = None
        self._kept: contextlib.ExitStack | None = None
        self._reasons: set[str] = set()
        self._spoilt = False  # by a change that failed half-way
        self._change: AbstractContextManager[None] | None = None
        self._closing = threading.Event()
        self._lock = threading.RLock()
        self.why = ""
        self._thread: threading.Thread | None = None
        if before_processing:
            self._begin()
        else:
            self._thread = threading.Thread(target=self._begin, name="mx-lend", daemon=True)
            self._thread.start()

    @classmethod
    def of_pull(cls, pull: mx.Pull, key: ProcessingKey, options: LoaderOptions) -> Lender:
        """Return the lender of a pull made with `hold=True`, whose memory it goes on giving until
        the engine's first change. It closes the pull.

        Args:
            pull: The pull, which has ended.
            key: Its variant.
            options: As for a lender.
        """
        lender = cls.__new__(cls)
        lender.key, lender._options, lender._copied = key, options, True
        lender._source, lender._thread, lender._change = None, None, None
        lender._reasons, lender._spoilt, lender._closing = set(), False, threading.Event()
        lender._lock, lender.why = threading.RLock(), ""
        lender._kept = contextlib.ExitStack()
        lender._kept.callback(pull.close)
        try:
            lender._source = pull.hold()
        except MxError as error:
            lender._not_lent(error)
            lender._kept.close()
        return lender

    def _begin(self) -> None:
        try:
            if not self._copied:
                self._tensors = _on_host(self._live)
            try:
                source = self._serve(self._files)
            except BindingError:
                if self._files is None:
                    raise
                source = self._serve(None)  # another source brought other files
        except MxError as error:
            if not self._closing.is_set():
                self._not_lent(error)
            return
        except Exception as error:  # noqa: BLE001 - of the engine's tensors; it must go on
            self._not_lent(error)
            return
        self._source = source
        event(log, "engine.lending", model=str(source.model), source=source.endpoint)

    def _serve(self, files: Path | None) -> mx.Source:
        return mx.serve(
            self._tensors if not self._copied else {n: t.cpu() for n, t in self._live.items()},
            model=self._name,
            revision=self._revision,
            variant=self.key,
            embed=False,
            copy=self._copied,
            files=files,
            wait_s=0,  # the engine starts without a coordinator
            settings=self._options.settings,
            cancelled=self._closing.is_set,
        )

    def _not_lent(self, error: Exception) -> None:
        self.why = str(error)
        event(
            log,
            "engine.not_lent",
            level=logging.WARNING,
            variant=str(self.key),
            text=f"{error}; the engine goes on, and lends nothing to other replicas",
        )

    def _settled(self) -> mx.Source | None:
        thread = self._thread
        if thread is not None:
            thread.join()
        return self._source

    @property
    def source(self) -> mx.Source | None:
        """What lends it, once it is hashed and registered; None before, and if that failed."""
        return self._source

    @property
    def state(self) -> str:
        """What becomes of it: "starting", "lending", "changing", or "withdrawn"."""
        if self._thread is not None and self._thread.is_alive():
            return "starting"
        if self._reasons:
            return "changing"
        source = self._source
        return "withdrawn" if source is None or source.withdrawn else "lending"

    def withdraw(self, reason: str) -> None:
        """Give the tensors to no reader from now on, since the engine is about to change them.

        Blocks until no reader has a lease on them, two seconds at most, and until they are hashed
        if they have just begun to be lent.

        Args:
            reason: A word; `restore` with the same one ends it.
        """
        with self._lock:
            source = self._settled()
            if source is None:
                return
            if self._copied:
                self.why = f"it was the state before processing, and {reason} has changed it since"
                self._end(source)
                event(log, "engine.withdrawn", model=str(source.model), text=self.why)
                return
            self._reasons.add(reason)
            if self._change is not None:
                return
            change = source.changing()
            try:
                change.__enter__()
                self._change = change
            except MxError as error:
                self._not_lent(error)
                self._reasons.clear()
                self._end(source)

    def restore(self, reason: str, *, failed: bool = False) -> None:
        """Lend the tensors again, as they are now, once each reason has ended.

        Args:
            reason: As for `withdraw`.
            failed: True if the change failed half-way: then they stay withdrawn until another
                change succeeds.
        """
        with self._lock:
            self._reasons.discard(reason)
            if failed or reason != ASLEEP:
                self._spoilt = failed
            change, source = self._change, self._source
            if self._reasons or change is None or source is None:
                return
            self._change = None
            try:
                if self._spoilt:
                    error = _FailedError()
                    with contextlib.suppress(_FailedError):
                        change.__exit__(_FailedError, error, None)
                else:
                    self._refresh()
                    change.__exit__(None, None, None)
            except MxError as error:
                self._not_lent(error)
                return
            self.why = source.withdrawn

    @torch.no_grad()
    def _refresh(self) -> None:
        """Copy tensors of other devices to their copies on the host again."""
        if self._tensors is not self._live:
            for name, tensor in self._live.items():
                there = self._tensors[name]
                if there.data_ptr() != tensor.data_ptr():
                    there.copy_(tensor)

    @contextlib.contextmanager
    def changing(self, reason: str) -> Iterator[None]:
        """Change the tensors inside the block.

        Args:
            reason: As for `withdraw`.
        """
        self.withdraw(reason)
        failed = True
        try:
            yield
            failed = False
        finally:
            self.restore(reason, failed=failed)

    def _end(self, source: mx.Source) -> None:
        self._source = None
        try:
            source.close()
            if self._kept is not None:
                self._kept.close()
        except MxError as error:
            log.warning("a source did not close: %s", error)

    def close(self) -> None:
        """End lending. Idempotent."""
        self._closing.set()
        with self._lock:
            source = self._settled()
            if source is not None:
                self._end(source)
            self._change = None


def _on_host(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors themselves if all are in host memory, else with copies of the others."""
    if all(tensor.device.type == "cpu" for tensor in tensors.values()):
        return tensors
    copies: dict[int, torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu":
            found[name] = tensor
        else:
            place = tensor.data_ptr()
            copy = copies.get(place)
            if copy is None or copy.shape != tensor.shape:
                copy = copies[place] = plain(tensor).cpu()
            found[name] = copy
    return found
