"""Lends what an engine's model holds, and withdraws it while the engine changes it.

The engine announces its changes with `withdraw` and `restore`. Other changes are noticed at the
model (`Lender.watch`): then the weights, which may be half written, stay withdrawn until the next
announced change has ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

import mx
from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey
from mx.engines.replica.frozen import on_signal
from mx.engines.replica.lent_tensors import LentTensors
from mx.engines.replica.logs import logger_of
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import ParameterSlot
from mx.engines.replica.write_watch import WriteWatch
from mx.errors import ConfigError, LocalError
from mx.log import event

#: The reason of a change that leaves the tensors as they were.
ASLEEP = "sleep"
#: The reason that a sleep leaves behind which discards what the tensors held.
DISCARDED = "the update that has to write what sleep has discarded"


class _FailedError(Exception):
    """The engine's change of its weights failed."""


class Lender:
    """Lends one model's tensors. Its errors are logged, never raised: they must not stop an engine.

    Tensors that are all on the host, or all on one GPU, are lent where they are. Of others those
    that are not on the host are lent as copies there, made on the engine's thread. Each is hashed
    first, on a thread of its own. `close` ends it. Thread-safe.

    The state before processing ends with the engine's first change. On a GPU it is lent where it is
    if processing leaves it as it was, and else not, unless a copy was asked for (`options.copy`): a
    second set of weights may not fit there, and takes memory that the engine computes with. Lent
    where it is it outlasts a sleep that keeps it.
    """

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
        pull: mx.Pull | None = None,
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
            pull: The pull of these tensors before processing, made with `hold=True`, which has
                ended: its memory is lent in their place. This closes it.
        """
        self.key = key
        #: Whether this ends with the engine's first change.
        self._passing = before_processing
        self._log = logger_of(engine)
        self._watch = WriteWatch(self._log)
        self._before = b""  # the identity before processing, while nothing is lent
        self._source: mx.Source | None = None
        self._kept = contextlib.ExitStack()
        self._reasons: set[str] = set()
        self._spoilt = False  # by a change that failed half-way
        self._past = ""  # what was written without a word of it
        self._updated = False  # by a change that has ended, since they were withdrawn
        #: Whether the tensors are to be written since a sleep has discarded what they held; and
        #: what that was, NAME@IDENTITY and the variant, if it is known.
        self._discarded = False
        self._lost: tuple[str, str] | None = None
        self._why = ""
        self._change: AbstractContextManager[None] | None = None
        self._on_signal: Any = None
        self._closing = threading.Event()
        model = ModelKey(name, revision, str(key))
        self._lent = LentTensors(slots, model, options, files, self._closing.is_set)
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        try:
            with self._harmless():
                if pull is not None:
                    self._kept.callback(pull.close)
                    self._take(pull.hold())
                elif not before_processing:
                    self._start()
                elif self._lent.on_gpu and not options.copy:
                    self._before = self._lent.identity()
                else:
                    self._lent.copy(options.copy if self._lent.on_gpu else "host")
                    self._begin()
        except BaseException:  # an interruption: no one else knows of this
            self.close()
            raise
        if pull is not None and self._source is None:
            self._end()
        try:
            self._on_signal = on_signal(self.freeze, options)
        except ConfigError as error:
            self._warn("freeze.failed", str(error))

    def processed(self) -> None:
        """Lend tensors that processing has left unchanged, unless copies were made before. Call it
        once, on the engine's thread."""
        if self._before:
            with self._harmless():
                self._start()

    def _start(self) -> None:
        """Begin to lend tensors where they are, on a thread."""
        self._watch.begin(self._lent.slots)  # before it is hashed: what changes later is noticed
        self._lent.gather()
        self._thread = threading.Thread(target=self._begin, name="mx-lend", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        try:
            if self._before and self._lent.identity() != self._before:
                raise ConfigError(
                    "processing has changed the weights, which are lent as they were before",
                    hint='the option "copy" ("device" or "host") keeps a copy of those',
                )
            source = self._lent.serve()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must go on
            self._watch.end()
            if not self._closing.is_set():
                self._not_lent(error)
            return
        self._take(source)
        event(self._log, "engine.lending", model=str(source.model), source=source.endpoint)

    def _take(self, source: mx.Source) -> None:
        self._kept.callback(source.close)
        self._source = source

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Say what fails inside the block: the engine must go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._not_lent(error)

    def _not_lent(self, error: Exception) -> None:
        self._why = str(error) or type(error).__name__
        text = f"{self._why}; the engine goes on, and lends nothing to other replicas"
        self._warn("engine.not_lent", text)

    def _warn(self, name: str, text: str) -> None:
        event(self._log, name, level=logging.WARNING, variant=str(self.key), text=text)

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

    def freeze(self, folder: str, **how: Any) -> Any:
        """Write what is lent to a snapshot, as `mx.freeze` does. Blocks.

        Args:
            folder: The snapshot's, the same for all ranks.
            how: Further arguments of `mx.freeze`, such as `kv_bytes`.

        Returns:
            Its report.

        Raises:
            ConfigError: Nothing is lent.
            MxError: As `mx.freeze`.
        """
        source = self._settled()
        if source is None or self.state != "lending":
            raise ConfigError(f"{self.key} is not lent: {self.why or self.state}")
        return mx.freeze(source, folder, settings=self._lent.settings, **how)

    def withdraw(self, reason: str) -> None:
        """Serve the tensors to no reader from now on, since the engine is about to change them.

        Blocks until no reader has a lease on them, two seconds at most, and until they are hashed
        if they have just begun to be lent.

        Args:
            reason: A word, which `restore` takes to end the withdrawal.
        """
        with self._lock:
            source = self._settled()
            self._discarded |= reason == DISCARDED
            if source is None:
                return
            if self._passing and not (self._before and reason == ASLEEP):
                self._end_passing(source, ASLEEP if reason == DISCARDED else reason)
                return
            unlisted = self._past or self._updated or self._spoilt or source.withdrawn
            if reason == DISCARDED and self._reasons == {ASLEEP} and not unlisted:
                key = source.model
                self._lost = f"{key.name}@{source.identity_hex}", key.variant
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
            self._end()

    def _end_passing(self, source: mx.Source, reason: str) -> None:
        self._why = f"it was the state before processing, and {reason} has changed it since"
        self._end()
        self._reasons.clear()
        self._change = None
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
                self._discarded, self._lost = False, None
            written = self._reasons or self._updated or self._spoilt or self._past
            if not (written or self._passing):
                self._compare(devices=True)  # sleep leaves them as they were
            change, source = self._change, self._source
            if self._reasons or self._past or change is None or source is None:
                return
            self._change = None
            with self._harmless():
                if self._passing and self._lent.identity() != self._before:
                    self._end_passing(source, reason)
                    return
                if self._spoilt:
                    with contextlib.suppress(_FailedError):
                        change.__exit__(_FailedError, _FailedError(), None)
                else:
                    self._watch.renew()
                    self._lent.refresh()
                    change.__exit__(None, None, None)
                self._why = ""

    def refill(self, finish: Callable[[], object]) -> None:
        """Take from a peer again what a sleep has discarded, into the same tensors, and lend it.
        Does nothing if something has written to them since.

        Args:
            finish: Has the engine make what it derives from the weights.

        Raises:
            LocalError: No peer has these weights, or it was lost, or they are not known. The
                tensors stay withdrawn until this, or an update, succeeds.
        """
        if not self._discarded:
            return
        began_s = time.monotonic()
        try:
            if self._lost is None:
                raise ConfigError("they were not lent, so nothing says which weights they were")
            model, variant = self._lost
            self._lent.take(model, variant)
            finish()
        except Exception as error:
            self._not_refilled(error)
            raise LocalError(
                f"the weights that sleep has discarded were not taken from a peer: {error}",
                hint="wake up again once one serves them, or have the engine reload them before",
            ) from error
        with self._lock:
            self._reasons.add(DISCARDED)
            self.restore(DISCARDED)
        seconds = round(time.monotonic() - began_s, 3)
        event(self._log, "engine.woken", model=model, variant=variant, seconds=seconds)

    def _not_refilled(self, error: Exception) -> None:
        """Leave the tensors, of which some may be filled, withdrawn until an update succeeds."""
        text = f"waking has not taken what sleep has discarded from a peer: {error}"
        with self._lock:
            if self._source is not None:
                self._past = text
                self._reasons.discard(DISCARDED)
        self._warn("engine.not_woken", text)

    # -- what the engine does not say -------------------------------------------------------------

    def watch(self, model: torch.nn.Module) -> None:
        """Watch for changes that the engine does not announce: calls of the model's `load_weights`
        outside of an update, and samples of its weights that differ from before.

        Args:
            model: The model, as the engine computes with it.
        """
        try:
            self._watch.follow(model, lambda: self.look(devices=False), self.written)
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._log.warning("writes to the weights may not be noticed: %s", error)

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
        if found := self._watch.written(devices=devices):
            self.written(found)

    def written(self, what: str) -> None:
        """Withdraw the tensors, since something writes to them outside of an announced change. Does
        nothing during such a change; sleep is not one.

        Args:
            what: What was found or called, for the log.
        """
        with self._lock:
            if ASLEEP not in self._reasons:
                self._discarded, self._lost = False, None
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

    def _end(self) -> None:
        """Lend nothing any more."""
        self._source = None
        self._watch.end()
        self._lent.drop()
        try:
            self._kept.close()
        except Exception as error:  # noqa: BLE001 - the engine must go on
            self._log.warning("what was lent did not close: %s", error)

    def close(self) -> None:
        """End lending. Idempotent."""
        self._closing.set()
        if self._on_signal is not None:
            self._on_signal.close()
        self._watch.end()
        with self._lock:
            self._settled()
            self._end()
            self._change = None
