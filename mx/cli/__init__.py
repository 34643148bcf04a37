"""The commands: argv -> settings -> mx.api. `mx` and `mx-coordinator` start here."""

from __future__ import annotations

# Little is imported before `_Interruptible` is entered: Ctrl-C would end in a traceback until then.
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from sys import UnraisableHookArgs

__all__ = ["coordinator_main", "main"]

#: The version of the objects of `--json`; raised when a field goes or changes its meaning.
SCHEMA = 1

_EXIT_INTERRUPTED = 130
_AGAIN_S = 0.05
#: New objects between two collections. All modules of a command are some 40,000.
_COLLECTED_AT = 50_000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx`; never returns."""
    with _Interruptible():
        _prepare()
        from mx.cli.app import app
        from mx.cli.outcome import run

        run(app, "mx", arguments)


def coordinator_main(arguments: Sequence[str] | None = None) -> None:
    """Run `mx-coordinator`; never returns."""
    with _Interruptible():
        _prepare()
        from mx.cli.coordinator import app
        from mx.cli.outcome import run

        run(app, "mx-coordinator", arguments)


def _prepare() -> None:
    """Set what has to be set before modules are imported."""
    import atexit
    import gc

    from mx import config

    _fill_standard_streams()
    # Garbage is collected less often: after each 700 new objects Python looks at them all while
    # modules are imported, which is garbage in none of them.
    gc.set_threshold(_COLLECTED_AT)
    # The collection at exit looks at all objects, which takes as long as a pull.
    atexit.register(gc.freeze)
    config.quieten_grpc()


def _fill_standard_streams() -> None:
    """Open /dev/null for the standard streams that are closed: else a file or a socket would get
    the number of one, and what libraries print there would go into it."""
    import os

    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it takes the lowest number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115


class _Interruptible:
    """Ends the process where it is interrupted while it is still importing, or misses a package."""

    def __enter__(self) -> None:
        self._before = sys.unraisablehook
        sys.unraisablehook = self._raise_again

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        sys.unraisablehook = self._before
        if isinstance(error, RuntimeError):  # Python 3.11 makes one of it while a class is made
            error = error.__cause__
        if isinstance(error, KeyboardInterrupt):
            sys.exit(_EXIT_INTERRUPTED)
        if isinstance(error, ModuleNotFoundError):
            name = str(error.name).partition(".")[0]
            if name not in ("mx", "mx_transports") and "--debug" not in sys.argv:
                sys.exit(_missing(name))

    def _raise_again(self, lost: UnraisableHookArgs) -> None:
        # It came where Python can raise nothing, as in a destructor: Ctrl-C would be lost. It is
        # raised again a little later, since it can't be raised in here either.
        import signal
        import threading

        if lost.exc_type is KeyboardInterrupt:
            main_thread = threading.main_thread().ident
            again = threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT))
            again.daemon = True
            again.start()
        else:
            self._before(lost)


def _missing(name: str) -> int:
    """Say that a package is not installed, with nothing but Python: it may be any that mx needs."""
    import json

    from mx.errors import EXIT_CONFIG

    message, hint = f"{name} is not installed, and mx needs it", "in a clone of mx: pip install ."
    print(f"error: {message}\n  {hint}", file=sys.stderr)
    if "--json" in sys.argv:
        kind = "ConfigError"
        error = {"type": kind, "message": message, "hint": hint, "exit_code": EXIT_CONFIG}
        print(json.dumps({"schema": SCHEMA, "error": error}), flush=True)
    return EXIT_CONFIG
