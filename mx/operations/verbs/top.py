"""`mx top`: each pull by layer, each source by readers and rate, as they go."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from mx.cli import options, outcome
from mx.cli.listing import SOURCES, layers_held, nearest_name, say_unknown
from mx.cli.printing import NAMES, Column, Plain, objects, table_of
from mx.config import Settings
from mx.errors import CoordinatorError, NotAllowedError
from mx.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from mx.api import Observer, Overview
    from mx.core.pull_status import PullStatus
    from mx.wire.listing import SourceStatus

INTERVAL_S = 0.5
#: What is older than this is shown with its age.
OLD_S = 2.0
#: Layers are shown one mark each up to this many, else in groups.
MARKS = 40
#: In a terminal of fewer columns than `WIDE` up to that many.
NARROW_MARKS, WIDE = 12, 120
_SIGNS = ("█", "▒", "·")
_ASCII_SIGNS = ("#", "+", ".")
_STYLES = {"complete": "green", "failed": "red"}


@options.takes_settings
def top(
    settings: Settings,
    model: Annotated[str, options.model_argument("Only what concerns this one.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Show it once, and end.")] = False,
    *,
    as_json: bool,
) -> None:
    """Watch pulls and sources, until q or Ctrl-C.

    Each pull by layer, in order: ready, in part, not yet; each source by readers
    and by what it serves. Where standard output is not a terminal it is shown once.

    **Examples**

    - `mx top`

    - `mx top llama-8b --once`
    """
    from mx import api

    console = Console(highlight=False)
    with api.Observer(coordinator=settings.coordinator, settings=settings) as observer:
        if as_json:
            outcome.emit(_object(settings.coordinator, observer.look(model)))
            return
        if once or not console.is_terminal:
            page, ascii_only = outcome.page(), console.options.ascii_only
            overview = observer.look(model)
            if model and _none(overview):
                say_unknown(f"pulls and sources of {model}", model, settings)
            page.print(Plain(render(overview, page.width, ascii_only=ascii_only)))
            return
        try:
            _watch(observer, model, settings, console)
        except KeyboardInterrupt:  # Ctrl-C ends `mx top`
            return


def _watch(observer: Observer, model: str, settings: Settings, console: Console) -> None:
    overview, note, seen_s = observer.look(model), "", time.time()
    address, hint = settings.coordinator, ""
    if model and _none(overview) and (alike := nearest_name(model, settings)):
        hint = f"the nearest name that is listed is {alike}"
    # A coordinator that does not answer is waited for in a thread of its own: the page goes on.
    with ThreadPoolExecutor(1, "mx-top") as looking, Keys() as keys, _screen(console) as live:
        looked: Future[Overview] | None = None
        while True:
            title = Text.assemble(
                ("mx top", "bold"), f"  {address}  {_age(seen_s, time.time())}  q ends it"
            )
            tables = render(overview, console.width, model, ascii_only=console.options.ascii_only)
            said = Text(note or (hint if _none(overview) else ""), style="red" if note else "")
            live.update(Plain(Group(title, said, tables)), refresh=True)
            looked = looked or looking.submit(observer.look, model)
            if "q" in keys.wait(INTERVAL_S).lower():
                return
            if not looked.done():
                continue
            try:
                overview, note, seen_s = looked.result(), "", time.time()
            except NotAllowedError:  # a new policy: nothing may be shown any more
                raise
            except CoordinatorError as error:
                note = f"{error.message}; what is shown is old"
            looked = None


def _screen(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False)


def _age(seen_s: float, now_s: float) -> str:
    """Return when what is shown was seen, and how long ago where that is more than a moment."""
    text = f"as of {time.strftime('%H:%M:%S', time.localtime(seen_s))}"
    old_s = now_s - seen_s
    return text if old_s < OLD_S else f"{text}, {old_s:.0f} s ago"


def _none(overview: Overview) -> bool:
    return not overview.pulls and not overview.sources


def render(overview: Overview, width: int, model: str = "", *, ascii_only: bool = False) -> Group:
    """Return both tables, for a terminal of this width; `model`: the only one that is shown."""
    most, of = MARKS if width >= WIDE else NARROW_MARKS, f" of {model}" if model else ""
    return Group(
        table_of(_pulls(most, ascii_only=ascii_only), overview.pulls, width)
        if overview.pulls
        else Text(f"no pulls{of}"),
        Text(),
        table_of(_SOURCES, overview.sources, width)
        if overview.sources
        else Text(f"no sources{of}"),
    )


def _state(pull: PullStatus) -> Text:
    """Return the phase; a pull that reads from no source now, and gets nothing, is waiting."""
    waits = pull.phase.value == "running" and not pull.sources and not pull.gb_per_s
    asked = f", requests at {pull.requests}" if pull.requests else ""
    text = f"{'waiting' if waits else pull.phase.value}{asked}"
    return Text(text, style=_STYLES.get(pull.phase.value, ""))


def _size(pull: PullStatus) -> str:
    return f"{format_bytes(pull.done_bytes)} of {format_bytes(pull.nbytes)}"


def _rate(gb_per_s: float) -> str:
    return format_rate(gb_per_s * 1e9)


def _pulls(most: int = MARKS, *, ascii_only: bool = False) -> Sequence[Column[PullStatus]]:
    return (
        Column("pull_id", "", lambda p: p.pull_id),
        Column("", "pull of", lambda p: p.model, folds=NAMES),
        Column("model", "", lambda p: p.model.name),
        Column("revision", "", lambda p: p.model.revision),
        Column("variant", "", lambda p: p.model.variant),
        Column("", "by", lambda p: f"{p.host}:{p.pid}", spare=1),
        Column("host", "", lambda p: p.host),
        Column("pid", "", lambda p: p.pid),
        Column("phase", "", lambda p: p.phase.value),
        Column("", "layers", lambda p: marks(p, most=most, ascii_only=ascii_only)),
        Column("layers", "", lambda p: p.layers),
        Column("layers_ready", "", lambda p: [n for n in range(p.layers) if p.ready >> n & 1]),
        Column("", "ready", lambda p: f"{p.layers_ready}/{p.layers}", right=True, spare=2),
        Column("bytes", "", lambda p: p.nbytes),
        Column("bytes_done", "", lambda p: p.done_bytes),
        Column("", "bytes", _size, right=True, spare=3),
        Column("seconds", "", lambda p: p.seconds),
        Column("gb_per_s", "rate", lambda p: p.gb_per_s, _rate, right=True),
        Column("", "time", lambda p: p.seconds, format_seconds, right=True, spare=4),
        Column("sources", "sources", lambda p: p.sources, len, right=True, spare=5),
        Column("retries", "retries", lambda p: p.retries, right=True, spare=6),
        Column("requests", "", lambda p: p.requests),
        Column("", "state", _state, folds=8),
    )


_SOURCES: Sequence[Column[SourceStatus]] = (
    Column("", "source of", lambda s: s.record.model, folds=NAMES),
    Column("", "endpoint", lambda s: s.record.endpoint),
    Column("", "host", lambda s: s.record.place.hostname, spare=3),
    Column("", "role", lambda s: s.record.role.value, spare=2),
    Column("", "state", lambda s: s.record.state.value),
    Column("", "layers", lambda s: layers_held(s.record), right=True, spare=1),
    Column("", "readers", lambda s: s.readers, right=True),
    Column("", "rate", lambda s: s.gb_per_s, _rate, right=True),
)


def marks(pull: PullStatus, *, most: int = MARKS, ascii_only: bool = False) -> str:
    """Return at most `most` signs, each for a layer or a group of neighbours: ready, in part, not
    yet."""
    full, some, none = _ASCII_SIGNS if ascii_only else _SIGNS
    size = max(1, -(-pull.layers // most))
    signs = []
    for begin in range(0, pull.layers, size):
        count = min(size, pull.layers - begin)
        ready = (pull.ready >> begin & ((1 << count) - 1)).bit_count()
        signs.append(full if ready == count else some if ready else none)
    return "".join(signs)


def _object(address: str, overview: Overview) -> dict[str, object]:
    return {
        "coordinator": address,
        "pulls": objects(_pulls(), overview.pulls),
        "sources": objects(SOURCES, overview.sources),
    }


# -- single keys from a terminal, without Enter ----------------------------------------------------


class Keys:
    """A context in which a terminal on standard input gives keys as they are pressed.

    They are not echoed, and Ctrl-C interrupts as ever. Leaving it restores the terminal's settings.
    """

    def __init__(self) -> None:
        self._descriptor = -1
        self._before: Any = None

    def __enter__(self) -> Keys:
        with contextlib.suppress(OSError, ValueError, termios.error):  # no input, or no terminal
            descriptor = sys.stdin.fileno()
            self._before = termios.tcgetattr(descriptor)
            tty.setcbreak(descriptor)
            self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            with contextlib.suppress(termios.error):  # the terminal was closed
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
        self._descriptor = -1

    def wait(self, seconds: float) -> str:
        """Wait for keys.

        Args:
            seconds: For how long at most.

        Returns:
            What was pressed, "" if nothing was. Where there is no terminal it only waits.
        """
        if self._descriptor < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(self._descriptor, 64)
        if not pressed:  # end of file: select would report it as readable for ever
            self._descriptor = -1
        return pressed.decode(errors="replace")
