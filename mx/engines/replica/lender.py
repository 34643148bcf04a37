"""Lends what an engine's model holds, and withdraws it while the engine changes it.

The engine announces its changes with `withdraw` and `restore`. Other changes are noticed at the
model (`Lender.watch`): then the weights, which may be half written, stay withdrawn until the next
announced change has ended.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mx
from mx.api.holding import lend
from mx.core.digest import shortcut_digest
from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey
from mx.engines.replica.logs import logger_of
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import LiveTensors, ParameterSlot, common_device, plain, slots_of
from mx.errors import BindingError, ConfigError
from mx.log import event

#: The reason of a change that leaves the tensors as they were.
ASLEEP = "sleep"
#: The reason that a sleep leaves behind which discards what the tensors held.
DISCARDED = "the update that has to write what sleep has discarded"
#: How often samples of the weights are compared, and the part of a core that this may take.
_WATCH_S, _WATCH_PART = 1.0, 0.01


class _FailedError(Exception):
    """The engine's change of its weights failed."""


class Lender:
    """Lends one model's tensors. Its errors are logged, never raised: they must not stop an engine.

    Tensors that are all on the host, or all on one GPU, are lent where they are. Of others those
    that are not on the host are lent as copies there, made on the engine's thread. Each is hashed
    first, on a thread of its own. `close` ends it. Thread-safe.

    The state before processing ends with the engine's first change. On a GPU it is lent where it is
    if processing leaves it as it was, and else not, unless a copy was asked for (`options.copy`): a
    second set of weights may not fit there, and takes memory that the engine computes with.
    """

    _tensors: Mapping[str, torch.Tensor]
    _watched: Mapping[str, ParameterSlot]
    _prints: Prints | None
    _thread: threading.Thread | None

    def __init__(
        self,
        slots: Mapping[str, ParameterSlot],
        name: str,
        key: ProcessingKey,
        options: LoaderOptions,
        *,
        engine: str = "vLLM",
        revision: str = "",
        files: Path | None = None,
        before_processing: bool = False,
    ) -> None:
        """Begin to lend.

        Args:
            slots: Where the model has its tensors.
            name: The model's name.
            key: Its variant.
            options: The coordinator, and the bounds of what is served.
            engine: Whose logger has the messages.
            revision: The revision to lend it as, "" for the default one.
            files: A folder with the model's configuration and tokenizer, to travel along.
            before_processing: Whether the engine is about to process these tensors. Before this
                returns they are copied; or, on a GPU, hashed, and lent after `processed`.
        """
        self._set_up(key, options, engine, passing=before_processing)
        self._name, self._revision, self._files = name, revision, files
        self._slots, self._live = slots, LiveTensors(slots)
        self._tensors = self._live
        try:
            if not before_processing:
                self._start()
                return
            on_gpu = common_device(self._live).startswith("cuda")
            if on_gpu and not options.copy:
                self._before = self._identity()
                return
            self._copies = not on_gpu or options.copy == "host"
            move = torch.Tensor.cpu if self._copies else torch.Tensor.clone
            self._tensors = _copied(self._live, move)
        except Exception as error:  # noqa: BLE001 - of the engine's tensors; it must go on
            self._not_lent(error)
            return
        self._begin()

    def processed(self) -> None:
        """Lend tensors that processing has left unchanged, unless copies were made before. Call it
        once, on the engine's thread."""
        if self._before:
            try:
                self._start()
            except Exception as error:  # noqa: BLE001 - of the engine's tensors; it must go on
                self._not_lent(error)

    def _start(self) -> None:
        """Begin to lend tensors where they are, on a thread."""
        self._watched = self._slots
        self._prints = Prints(self._slots)  # before it is hashed: what changes later is noticed
        if not common_device(self._live):
            self._tensors = _copied(self._live, torch.Tensor.cpu)
        self._thread = threading.Thread(target=self._begin, name="mx-lend", daemon=True)
        self._thread.start()

    def _identity(self) -> bytes:
        """Return the identity of the tensors as they are now."""
        key = ModelKey(self._name, self._revision, str(self.key))
        held = lend(self._live, key, cancelled=self._closing.is_set)
        held.release()
        return held.manifest.ref.identity

    def _set_up(
        self, key: ProcessingKey, options: LoaderOptions, engine: str, *, passing: bool
    ) -> None:
        self.key = key
        #: Whether this ends with the engine's first change, and whether mx copies the tensors.
        self._passing, self._copies = passing, False
        self._options, self._log = options, logger_of(engine)
        self._before = b""  # the identity before processing, while nothing is lent
        self._source: mx.Source | None = None
        self._kept = contextlib.ExitStack()
        self._reasons: set[str] = set()
        self._spoilt = False  # by a change that failed half-way
        self._past = ""  # what was written without a word of it
        self._updated = False  # by a change that has ended, since they were withdrawn
        self._why = ""
        self._change: AbstractContextManager[None] | None = None
        self._tensors, self._watched, self._prints = {}, {}, None
        self._closing = threading.Event()
        self._over = threading.Event()  # nothing is lent any more, nor will be
        self._lock = threading.RLock()
        self._thread = None
        self._watchman: threading.Thread | None = None

    @classmethod
    def of_pull(
        cls, pull: mx.Pull, key: ProcessingKey, options: LoaderOptions, *, engine: str = "vLLM"
    ) -> Lender:
        """Return the lender of a pull made with `hold=True`, whose memory it goes on serving until
        the engine's first change. It closes the pull.

        Args:
            pull: The pull, which has ended.
            key: Its variant.
            options: As for a lender.
            engine: As for a lender.
        """
        lender = cls.__new__(cls)
        lender._set_up(key, options, engine, passing=True)
        lender._kept.callback(pull.close)
        try:
            lender._source = pull.hold()
        except Exception as error:  # noqa: BLE001 - the engine must go on
            lender._not_lent(error)
            lender._let_go()
        return lender

    def _begin(self) -> None:
        try:
            if self._before and self._identity() != self._before:
                raise ConfigError(
                    "processing has changed the weights, which are lent as they were before",
                    hint='the option "copy" ("device" or "host") keeps a copy of those',
                )
            try:
                source = self._serve(self._files)
            except BindingError:
                if self._files is None:
                    raise
                source = self._serve(None)  # another source brought other files
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must go on
            self._over.set()
            if not self._closing.is_set():
                self._not_lent(error)
            return
        self._source = source
        if self._copies:
            self._tensors = {}
        event(self._log, "engine.lending", model=str(source.model), source=source.endpoint)

    def _serve(self, files: Path | None) -> mx.Source:
        return mx.serve(
            self._tensors,
            model=self._name,
            revision=self._revision,
            variant=self.key,
            embed=False,
            copy=self._copies,
            files=files,
            wait_s=0,  # the engine starts without a coordinator
            settings=self._options.settings,
            cancelled=self._closing.is_set,
        )

    def _not_lent(self, error: Exception) -> None:
        self._why = str(error) or type(error).__name__
        event(
            self._log,
            "engine.not_lent",
            level=logging.WARNING,
            variant=str(self.key),
            text=f"{self._why}; the engine goes on, and lends nothing to other replicas",
        )

    def _settled(self) -> mx.Source | None:
        thread = self._thread
        if thread is not None:
            thread.join()
        return self._source

    @property
    def source(self) -> mx.Source | None:
        """The source that lends the tensors; None before they are hashed and registered, or if that
        failed."""
        return self._source

    @property
    def state(self) -> str:
        """The state of lending: "starting", "lending", "changing", or "withdrawn"."""
        if self._thread is not None and self._thread.is_alive():
            return "starting"
        if self._reasons:
            return "changing"
        source = self._source
        return "withdrawn" if source is None or self._past or source.withdrawn else "lending"

    @property
    def why(self) -> str:
        """Why nothing is lent, or ""."""
        source = self._source
        if self._reasons:
            return f"{' and '.join(sorted(self._reasons))} has not ended"
        return self._past or (source.withdrawn if source is not None else "") or self._why

    def withdraw(self, reason: str) -> None:
        """Serve the tensors to no reader from now on, since the engine is about to change them.

        Blocks until no reader has a lease on them, two seconds at most, and until they are hashed
        if they have just begun to be lent.

        Args:
            reason: A word, which `restore` takes to end the withdrawal.
        """
        with self._lock:
            source = self._settled()
            if source is None:
                return
            if self._passing:
                self._end_passing(source, reason)
                return
            self._reasons.add(reason)
            self._enter(source)

    def _enter(self, source: mx.Source) -> None:
        if self._change is not None:
            return
        try:
            change = source.changing()
            change.__enter__()
            self._change, self._updated = change, False
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._not_lent(error)
            self._reasons.clear()
            self._end(source)

    def _end_passing(self, source: mx.Source, reason: str) -> None:
        self._why = f"it was the state before processing, and {reason} has changed it since"
        self._end(source)
        event(self._log, "engine.withdrawn", model=str(source.model), text=self._why)

    def restore(self, reason: str, *, failed: bool = False) -> None:
        """Lend the tensors again, as they are now, once each reason has ended.

        Args:
            reason: As for `withdraw`. One that nothing was withdrawn for changes nothing.
            failed: True if the change failed half-way: then they stay withdrawn until another
                change succeeds.
        """
        with self._lock:
            if reason not in self._reasons or (reason == DISCARDED and ASLEEP in self._reasons):
                return  # no one has written to memory that is not there
            self._reasons.discard(reason)
            if failed or reason != ASLEEP:
                self._spoilt = failed
            if not failed and reason != ASLEEP:
                self._past, self._updated = "", True
            if not self._reasons and not self._updated and not self._spoilt:
                self._compare(devices=True)  # sleep leaves them as they were
            change, source = self._change, self._source
            if self._reasons or self._past or change is None or source is None:
                return
            self._change = None
            try:
                if self._spoilt:
                    error = _FailedError()
                    with contextlib.suppress(_FailedError):
                        change.__exit__(_FailedError, error, None)
                else:
                    self._prints = Prints(self._watched)
                    self._refresh()
                    change.__exit__(None, None, None)
                self._why = ""
            except Exception as error:  # noqa: BLE001 - the engine must go on
                self._not_lent(error)

    # -- what the engine does not say -------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> None:
        """Watch for changes that the engine does not announce: calls of the model's `load_weights`
        outside of an update, and samples of its weights that differ from before.

        Args:
            model: The model, as the engine computes with it.
        """
        try:
            with self._lock:
                if not self._watched:
                    found = slots_of(model, non_persistent=False)
                    self._watched = {name: slot for name, slot in found.items() if slot.parameter}
                    self._prints = Prints(self._watched)
            _watch_load_weights(model, self)
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._log.warning("writes to the weights may not be noticed: %s", error)
            return
        self._watchman = threading.Thread(target=self._look, name="mx-watch", daemon=True)
        self._watchman.start()

    def _look(self) -> None:
        wait_s = _WATCH_S
        while not self._over.wait(wait_s):
            began_s = time.monotonic()
            self.look(devices=False)
            wait_s = max(_WATCH_S, (time.monotonic() - began_s) / _WATCH_PART)

    def look(self, *, devices: bool) -> None:
        """Compare the weights with what they were, and withdraw them if they were written to.

        Args:
            devices: Whether to read weights on devices, too: only on the engine's own thread, since
                it may be capturing graphs.
        """
        with self._lock:
            if self.state == "lending":
                self._compare(devices=devices)

    def _compare(self, *, devices: bool) -> None:
        if self._prints is None:
            return
        try:
            found = self._prints.written(devices=devices)
        except Exception as error:  # noqa: BLE001 - the engine frees memory as it likes
            found = f"its weights can't be read any more: {error}"
        if found:
            self.written(found)

    def written(self, what: str) -> None:
        """Withdraw the tensors, since something writes to them outside of an announced change. Does
        nothing during such a change; sleep is not one.

        Args:
            what: What was found or called, for the log.
        """
        with self._lock:
            if self._reasons - {ASLEEP} or self._past:
                return
            source = self._settled()
            if source is None:
                return
            if self._passing:
                self._end_passing(source, f"something ({what})")
                return
            self._past = f"{what} outside of an update; the next update lends the weights again"
            event(
                self._log,
                "engine.withdrawn",
                level=logging.WARNING,
                model=str(source.model),
                text=self._past,
            )
            self._enter(source)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Renew the host's copies of tensors that are on devices."""
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
        self._over.set()
        try:
            source.close()
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._log.warning("a source did not close: %s", error)
        self._let_go()

    def _let_go(self) -> None:
        try:
            self._kept.close()
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._log.warning("a pull did not close: %s", error)

    def close(self) -> None:
        """End lending. Idempotent."""
        self._closing.set()
        self._over.set()
        with self._lock:
            source = self._settled()
            if source is not None:
                self._end(source)
            self._change = self._prints = None
            self._watched, self._tensors = {}, {}


def _copied(
    tensors: Mapping[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return tensors, with copies of those on devices; tied tensors have one copy."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor
        if tensor.device.type != "cpu":
            place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
            if place not in copies:
                copies[place] = copy(plain(tensor))
            found[name] = copies[place]
    return found


def _watch_load_weights(model: Any, lender: Lender) -> None:
    """Replace a model's `load_weights` by one that notifies the lender before it writes."""
    original = getattr(model, "load_weights", None)
    if original is None:
        return
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    def load_weights(itself: Any, *arguments: Any, **named: Any) -> Any:
        if itself is model:
            lender.written("the model's `load_weights` was called")
        elif function is not None:  # a copy, with weights of its own
            return function(itself, *arguments, **named)
        return original(*arguments, **named)

    model.load_weights = types.MethodType(load_weights, model)  # of a copy it is the copy's


# -- notices writes to a model's weights that were not announced -----------------------------------

#: Of a larger tensor this many pieces of this many bytes are looked at, its ends among them.
_PIECES, _PIECE_BYTES = 16, 64


@dataclass(frozen=True)
class _Print:
    """What is compared of one tensor."""

    place: tuple[object, ...]
    #: torch's counter of writes, which misses those through `.data`; -1 for an inference tensor.
    version: int
    sample: bytes


class Prints:
    """A record of tensors as they are now: their addresses, torch's counters, and samples.

    An update of a model, a merged adapter or another checkpoint is noticed, since nearly every
    element of some tensor changes. A write to a few elements of a large tensor may be missed.
    """

    def __init__(self, slots: Mapping[str, ParameterSlot]) -> None:
        """
        Args:
            slots: The slots of the tensors. Those on devices are read, too: make it on a thread
                that may use the device.
        """
        self._slots = slots
        self._prints = {
            name: _print(tensor, True)
            for name, slot in slots.items()
            if (tensor := slot.get()) is not None and not tensor.is_meta
        }

    def written(self, *, devices: bool) -> str:
        """Return which tensor has changed since, and how, or "".

        Args:
            devices: Whether to read tensors of devices, too: only on a thread that may use them.
        """
        for name, before in self._prints.items():
            tensor = self._slots[name].get()
            if tensor is None:
                return f"{name} was removed"
            now = _print(tensor, devices)
            if now.place != before.place:
                return f"{name} was replaced"
            if now.version != before.version or now.sample not in (b"", before.sample):
                return f"{name} was written to"
        return ""


@torch.no_grad()
def _print(tensor: torch.Tensor, devices: bool) -> _Print:
    found, version = plain(tensor), -1
    with contextlib.suppress(RuntimeError):
        version = found._version
    place = (found.data_ptr(), found.shape, found.stride(), found.dtype)
    read = found.device.type == "cpu" or devices
    return _Print(place, version, _sample(found) if read else b"")


def _sample(tensor: torch.Tensor) -> bytes:
    """Return a digest of pieces of a tensor's memory, from its first element to its last; b"" for a
    tensor without elements."""
    if not tensor.numel() or tensor.layout is not torch.strided:
        return b""
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((reach + 1,), (1,)).view(torch.uint8)
    if len(memory) > _PIECES * _PIECE_BYTES:
        step = (len(memory) - _PIECE_BYTES) // (_PIECES - 1)
        pieces = memory.unfold(0, _PIECE_BYTES, step).reshape(-1)
        memory = torch.cat([pieces, memory[-_PIECE_BYTES:]])
    return shortcut_digest(memory.cpu().numpy().tobytes())
