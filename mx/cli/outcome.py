"""How a command ends: its object on standard output, its errors, its exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from types import FrameType, MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from mx.cli import SCHEMA
from mx.cli.words import in_flags
from mx.errors import EXIT_CONFIG, EXIT_OK, EXIT_OTHER, MxError
from mx.text import plain_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXIT_INTERRUPTED = 128 + signal.SIGINT

#: What the machine refuses is not a fault of mx.
_MACHINES = frozenset(
    (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
)

#: So many signals that end a command let it clean up.
_PATIENCE = 2

_as_lines = False
_quiet = False
_signals = 0


class CommandInterrupted(Exception):
    """Ctrl-C ended a command that has something to say about it.

    Attributes:
        hint: What the user can do now; "" for nothing.
    """

    def __init__(self, hint: str) -> None:
        super().__init__("interrupted")
        self.hint = hint


def use_json_lines(wanted: bool) -> None:
    """Choose what standard error gets from now on.

    Args:
        wanted: True for JSON, one object a line; False for text.
    """
    global _as_lines
    _as_lines = wanted


def be_quiet(wanted: bool) -> None:
    """Choose whether progress, notes and summaries are left out from now on."""
    global _quiet
    _quiet = wanted


@functools.cache
def notes() -> Console:
    """Return the console for progress, notes and errors; standard output is for results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def shows_progress() -> bool:
    """Return True where standard error is a terminal and gets text."""
    return not _as_lines and not _quiet and _is_terminal() and notes().is_terminal


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def say(text: str) -> None:
    """Write a note to standard error, unless it is to be quiet; a terminal's lines are broken at
    spaces only."""
    if not _quiet:
        _tell(text)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed, and a server goes on
        if _as_lines:
            _write("info", "message", {"text": text})
        else:
            _say(plain_lines(text))


def _say(text: str, head: str = "") -> None:
    """Write a text behind a head in bold red, on a terminal in lines that fit it. Only a terminal
    needs rich, which takes a while."""
    if _is_terminal():
        from mx.cli.printing import fitted

        text = fitted(head + text, notes().width)[len(head) :]
        notes().print(head, style="bold red", end="")
        notes().print(text, markup=False, soft_wrap=True)
    elif sys.stderr is not None:
        print(head + text, file=sys.stderr, flush=True)


def ignore_hangup() -> Any:
    """Ignore SIGHUP, so that a server goes on when its terminal is closed.

    Returns:
        The handler that was set before.
    """
    return signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _write(level: str, event: str, fields: Mapping[str, object]) -> None:
    from mx import log

    print(log.json_line(level, event, fields, time.time()), file=sys.stderr, flush=True)


def emit(result: Mapping[str, object]) -> None:
    """Write the one object of `--json` to standard output, on a line of its own. It says which
    version of these objects it is (`schema`)."""
    result = {"schema": SCHEMA, **result}
    # DEL is the one control character that JSON leaves as it is.
    print(json.dumps(result).replace("\x7f", "\\u007f"), flush=True)


def write(text: str) -> None:
    """Write a result to standard output; lines that are too long for a terminal are broken."""
    text = plain_lines(text)
    if sys.stdout.isatty():
        from mx.cli.printing import fitted

        text = fitted(text, shutil.get_terminal_size().columns)
    print(text, flush=True)


def summarise(text: str) -> None:
    """Write to standard output what a command has done, unless it is to be quiet."""
    if not _quiet:
        write(text)


def pin_covers(files: object) -> str:
    """Return what a pin covers, in words; `files` is true if it covers files."""
    return "(weights and files)" if files else "(weights only: there are no files)"


def page() -> Console:
    """Return standard output for tables: a terminal in its width, a pipe in full."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=250)


def show(table: Table, console: Console | None = None) -> None:
    """Write a table to standard output, or to what `page` has returned."""
    from mx.cli.printing import Plain

    console = console or page()
    # What comes from elsewhere is text, not markup.
    if console.is_terminal:
        console.print(Plain(table), markup=False)
        return
    with console.capture() as caught:
        console.print(Plain(table), markup=False)
    # rich fills each line up to the width of the table.
    print("\n".join(map(str.rstrip, caught.get().splitlines())), flush=True)


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None) -> NoReturn:
    """Run a command line and exit; an error is printed without a traceback.

    Args:
        app: The command.
        name: What usage errors call it.
        arguments: Those after the name; None for the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    sys.excepthook = _FaultHook(as_json=as_json, debug="--debug" in given)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _terminated)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal need not know all characters
        sys.stdout.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    try:
        outcome = command.main(given, prog_name=name, standalone_mode=False)
    except MxError as error:
        if "--debug" in given:
            sys.stderr.write(plain_lines(traceback.format_exc()))
        outcome = fail(
            error.exit_code,
            type(error).__name__,
            error.message,
            error.hint,
            as_json=as_json,
            details=error.details,
        )
    except CommandInterrupted as error:
        outcome = _interrupted(error.hint, as_json=as_json)
    except typer.TyperException as error:
        context = getattr(error, "ctx", None)
        hint = f"see {context.command_path if context else name} --help"
        message = error.format_message()
        if message:  # empty where the help was shown instead
            fail(EXIT_CONFIG, "UsageError", message, hint, as_json=as_json)
        outcome = EXIT_CONFIG
    else:
        if outcome == EXIT_INTERRUPTED:
            _interrupted("", as_json=as_json)
    sys.exit(outcome if isinstance(outcome, int) else EXIT_OK)


def _interrupted(hint: str, *, as_json: bool) -> int:
    """Report that Ctrl-C ended the command. Returns the exit code."""
    return fail(EXIT_INTERRUPTED, "Interrupted", "interrupted", hint, as_json=as_json)


def fail(
    exit_code: int,
    kind: str,
    message: str,
    hint: str,
    *,
    as_json: bool,
    details: Mapping[str, object] = MappingProxyType({}),
) -> int:
    """Report an error on standard error and, with `--json`, on standard output.

    Args:
        exit_code: What the command ends with.
        kind: The error's type.
        message: What went wrong. Arguments in backquotes become flags, here and in `hint`.
        hint: What the user can do; "" for nothing.
        as_json: True also writes the error as the one object of `--json`.
        details: What that says besides.

    Returns:
        `exit_code`.
    """
    message, hint = in_flags(message), in_flags(hint)
    error = {"type": kind, "message": message, "hint": hint, "exit_code": exit_code}
    if as_json:
        emit({"error": error | dict(details)})
    if _as_lines:
        _write("error", "error", error)
        return exit_code
    with contextlib.suppress(OSError):
        _say(plain_lines(message), "error: ")
    if hint:
        _tell(f"  {hint}")
    return exit_code


def count_signal(number: int) -> None:
    """End the command at once if this is the third signal that is to end it: what it waits for,
    such as a read from a file system that hangs, may never come."""
    global _signals
    _signals += 1
    if _signals > _PATIENCE:
        if _is_terminal():
            os.write(2, b"\x1b[?25h\n")  # progress hides the cursor
        os._exit(128 + number)


def _terminated(number: int, frame: FrameType | None) -> None:
    # An exception, so that the command cleans up on the way out.
    count_signal(number)
    if number == signal.SIGINT:
        signal.default_int_handler(number, frame)
    sys.exit(128 + number)


class _FaultHook:
    """The `sys.excepthook`: reports a fault of mx. Python exits with 1 after it."""

    def __init__(self, *, as_json: bool, debug: bool) -> None:
        self._as_json = as_json
        self._debug = debug

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._debug:
            lines = traceback.format_exception(kind, error, trace)
            sys.stderr.write(plain_lines("".join(lines)))
        hint = "this is a fault in mx: please report it with what --debug prints"
        text = f"{kind.__name__}: {error}" if str(error) else kind.__name__
        if isinstance(error, OSError) and error.errno in _MACHINES:
            where = f"{error.filename}: " if error.filename else ""
            text = f"{where}{error.strerror}"
            hint = "check permissions, free space and limits; --debug shows what needed it"
        elif isinstance(error, MemoryError):
            text = "this process can't have the memory that it needs"
            hint = "free memory, or raise its limit (ulimit -v); --debug shows what needed it"
        fail(EXIT_OTHER, kind.__name__, text, hint, as_json=self._as_json)
