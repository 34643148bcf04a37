"""`freeze_on_signal`: a signal freezes what a process holds, while the process goes on."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mx import config
from mx.core.variant import ProcessingKey
from mx.errors import ClosedError, ConfigError, MxError
from mx.log import event
from mx.snapshots.freezing import FreezeReport, freeze
from mx.threads import Threads

if TYPE_CHECKING:
    from mx.api.target import Pull
    from mx.core.types import ModelKey
    from mx.fetching.report import PullReport

_log = logging.getLogger(__name__)
#: Seconds after which a freeze that runs notices that it is to end.
_LOOK_S = 0.2
#: Bytes that are no signal's number: the end of what listens, and a handler that has run.
_CLOSED, _HANDLED = b"\0", b"\xff"


class SignalFreezer:
    """Freezes at each signal; a context manager, which ends that. Made and closed on the main
    thread: no other one can set a handler. A forked child has the handler from before.

    Python runs a handler once the main thread gets to it, and that may stay blocked for as long as
    it likes: a signal that comes just before a system call does not interrupt it. So the signal is
    heard by `signal.set_wakeup_fd`, which needs no thread of Python's, unless that is in use: an
    event loop that uses it wakes the main thread, which runs the handler."""

    def __init__(self, call: Callable[..., FreezeReport], folder: str | Path, number: int) -> None:
        """
        Args:
            call: Freezes; it takes `wait`, as `freeze` does.
            folder: Where to, for the log.
            number: The signal.

        Raises:
            ConfigError: This is not the main thread, or the signal can have no handler.
        """
        self._call, self._folder, self._number = call, str(folder), signal.Signals(number)
        #: A byte for each signal as it comes, its number, and one for each run of the handler,
        #: which takes no lock, since it may interrupt itself.
        self._came, self._tell = os.pipe()
        os.set_blocking(self._tell, False)
        self._deaf = False  # whether the handler does nothing
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="mx-freeze-signal", daemon=True)
        try:
            self._before = signal.signal(number, self._handle)
        except (ValueError, OSError) as error:
            self.close_pipe()
            raise ConfigError(
                f"{self._number.name} can't freeze: {error}",
                hint="name another signal, as SIGUSR1, and on the main thread",
            ) from error
        if (wakes := signal.set_wakeup_fd(self._tell, warn_on_full_buffer=False)) != -1:
            signal.set_wakeup_fd(wakes)
        _open.add(self)
        self._thread.start()
        atexit.register(self.close)
        event(_log, "freeze.armed", signal=self._number.name, pid=os.getpid(), folder=self._folder)

    def __enter__(self) -> SignalFreezer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the handler from before, and end a freeze that runs, which keeps what it has
        written. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            atexit.unregister(self.close)
            restored = self.restore()
            os.write(self._tell, _CLOSED)
            self._thread.join()
            if restored:
                self.close_pipe()

    def close_pipe(self) -> None:
        """Close what the signals are heard by; call it once, after `restore` has returned True."""
        os.close(self._came)
        os.close(self._tell)

    def restore(self) -> bool:
        """Restore the handler from before, unless another has taken the place of this one's.

        Returns:
            Whether nothing is written to the pipe by signals any more: not if this is another
            thread than the main one, where the handler stays, and does nothing.
        """
        _open.discard(self)
        self._deaf = True
        try:
            if signal.getsignal(self._number) == self._handle:
                signal.signal(self._number, self._before or signal.SIG_DFL)
            if (wakes := signal.set_wakeup_fd(-1)) != self._tell:
                signal.set_wakeup_fd(wakes)
        except ValueError:
            return False
        return True

    def _handle(self, *_: object) -> None:
        if not self._deaf:  # else the pipe may be another file
            with contextlib.suppress(BlockingIOError):
                os.write(self._tell, _HANDLED)

    def _listen(self) -> None:
        with Threads(1, "mx-freeze") as freezing:
            running = None
            handled_later = False
            while (came := os.read(self._came, 1)) != _CLOSED:
                if came == _HANDLED and handled_later:
                    handled_later = False
                    continue
                if came not in (_HANDLED, bytes([self._number])):
                    continue  # another signal
                handled_later = came != _HANDLED
                if running is None or running.done():
                    running = freezing.submit(self._freeze)
                else:
                    text = "a freeze runs already: this signal changes nothing"
                    event(_log, "freeze.busy", folder=self._folder, text=text)

    def _freeze(self) -> None:
        try:
            report = self._call(wait=self._wait)
        except Exception as error:  # noqa: BLE001 - whatever it is, the process goes on
            text = error.message if isinstance(error, MxError) else repr(error)
            event(_log, "freeze.failed", level=logging.WARNING, folder=self._folder, text=text)
            return
        event(
            _log,
            "freeze.ended",
            model=report.model,
            folder=self._folder,
            bytes=report.bytes,
            seconds=round(report.seconds, 3),
            complete=report.complete,
        )

    def _wait(self, pull: Pull, _: ModelKey) -> PullReport:
        while not self._closing.is_set():
            try:
                return pull.wait(_LOOK_S)
            except TimeoutError:
                continue
        raise ClosedError("what freezes on a signal was closed meanwhile")


_open: weakref.WeakSet[SignalFreezer] = weakref.WeakSet()


def _in_child() -> None:
    """Restore what handled the signals before: a forked child has no thread that freezes."""
    for each in list(_open):
        atexit.unregister(each.close)
        if each.restore():
            each.close_pipe()


os.register_at_fork(after_in_child=_in_child)


def freeze_on_signal(
    what: Any,
    folder: str | Path,
    *,
    number: int = signal.SIGUSR1,
    model: str = "",
    revision: str = "",
    variant: str | ProcessingKey = "",
    transport: str | None = None,
    kv_bytes: int | str = 0,
    settings: config.Settings | None = None,
) -> SignalFreezer:
    """Have a signal freeze what this process holds. Call it on the main thread.

    The handler only wakes a thread, which freezes while the process goes on. The log says how that
    ends (`freeze.ended`, `freeze.failed`). A signal during a freeze changes nothing
    (`freeze.busy`).

    Args:
        what: What to freeze, as for `freeze`: a `Source`, a module or a state dict.
        folder: The folder to make; one that is a snapshot already is left as it is.
        number: The signal.
        model: As for `freeze`.
        revision: As there.
        variant: As there.
        transport: As there.
        kv_bytes: As there.
        settings: As there.

    Returns:
        What the caller closes: that restores the handler from before.

    Raises:
        ConfigError: This is not the main thread, or the signal can have no handler.
    """
    call = partial(
        freeze,
        what,
        folder,
        model=model,
        revision=revision,
        variant=variant,
        transport=transport,
        kv_bytes=kv_bytes,
        settings=settings,
    )
    return SignalFreezer(call, folder, number)
