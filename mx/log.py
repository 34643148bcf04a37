"""Logging of events with fields: as text for users, or a JSON object per line for programs.

Modules use ordinary loggers named after themselves (`logging.getLogger(__name__)`), below `mx`, and
importing them installs no handler: a program that embeds mx sees its events as it sees other
libraries'. The commands call `set_up`.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TextIO

from mx.text import plain, plain_lines

#: Loggers of this project; others are shown from WARNING on, except at level "debug".
_OURS = ("mx", "mx_transports")
#: The logger of decisions about principals, whose lines are JSON in each format.
AUDIT = "mx.audit"


@dataclass(frozen=True, slots=True)
class Event:
    """The message of a log record: `str` is its text, and `record.msg.fields` its fields."""

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([self.name, *map(_shown, self.fields, self.fields.values())])


def event(
    logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: object
) -> None:
    """Log an event.

    Args:
        logger: The module's logger.
        name: The event, in dotted words, such as "source.registered".
        level: A level of `logging`.
        fields: The event's fields. Untrusted texts are printed without control characters.
    """
    if logger.isEnabledFor(level):
        logger.log(level, Event(name, fields), stacklevel=2)


class Throttle:
    """Lets one line of each cause through in an interval, and counts the others: for events that
    any client can cause. Not thread-safe."""

    def __init__(self, interval_s: float = 10.0, most_causes: int = 100) -> None:
        """
        Args:
            interval_s: After a line, further ones of its cause are counted for this long.
            most_causes: How many causes are told apart at a time; all others are one, `None`.
        """
        self._interval_s = interval_s
        self._most_causes = most_causes
        #: By cause: until when its lines are counted, and how many there were. In that order.
        self._counted: dict[Hashable, tuple[float, int]] = {}

    @property
    def is_empty(self) -> bool:
        """True if no cause is known, which `left_out` has not forgotten."""
        return not self._counted

    def passes(self, cause: Hashable, now_s: float | None = None) -> int | None:
        """Decide about the next line of a cause.

        Returns:
            None to hold it back, else the number of lines of this cause that were held back since
            the last that passed.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if cause not in self._counted and len(self._counted) >= self._most_causes:
            cause = None
        until_s, count = self._counted.get(cause, (0.0, 0))
        if cause in self._counted and now_s < until_s:
            self._counted[cause] = until_s, count + 1
            return None
        self._counted.pop(cause, None)
        self._counted[cause] = now_s + self._interval_s, 0
        return count

    def left_out(self, now_s: float | None = None) -> list[tuple[Hashable, int]]:
        """Forget the causes whose interval has ended, and return those of which lines were held
        back, with their number. Call this now and then."""
        now_s = time.monotonic() if now_s is None else now_s
        ended = []
        for cause, (until_s, count) in self._counted.items():
            if now_s < until_s:
                break
            ended.append((cause, count))
        for cause, _ in ended:
            del self._counted[cause]
        return [each for each in ended if each[1]]


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at that moment: a progress display puts itself in its place,
    and writes lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def set_up(
    level: str,
    style: str,
    stream: TextIO | None = None,
    words: Callable[[str], str] = lambda text: text,
) -> None:
    """Show log records from now on, in place of an earlier `set_up`.

    Args:
        level: "debug", "info", "warning" or "error", for loggers of mx; "debug" shows others too.
        style: "text" or "json".
        stream: The output, by default standard error.
        words: Translates a text into the words of the interface that the user sees.
    """
    handler = _StandardError() if stream is None else logging.StreamHandler(stream)
    handler.set_name("mx")
    handler.setFormatter(_Json(words) if style == "json" else _Text(words))
    root = logging.getLogger()
    for old in [each for each in root.handlers if each.get_name() == "mx"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    # gRPC logs calls that end with a process, which is not news to the user.
    logging.getLogger("grpc").setLevel(logging.NOTSET if level == "debug" else logging.CRITICAL + 1)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())


def json_line(level: str, name: str, fields: Mapping[str, object], at_s: float) -> str:
    """Return one event as JSON: ts (UTC), level, event, fields. `at_s` is in Unix time."""
    ts = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    line = {"ts": ts.replace("+00:00", "Z"), "level": level, "event": name, "fields": fields}
    # JSON escapes all control characters but this one, to which some terminals react.
    return json.dumps(line, default=str).replace("\x7f", "\\u007f")


class TextFormatter(logging.Formatter):
    """Formats a log record as one line, and its traceback below, without control characters."""

    def __init__(self, words: Callable[[str], str] = lambda text: text) -> None:
        super().__init__()
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        head = plain(f"{at} {record.levelname} {record.name}: {self._words(record.getMessage())}")
        if not record.exc_info:
            return head
        return f"{head}\n{plain_lines(self.formatException(record.exc_info))}"


class _Json(logging.Formatter):
    def __init__(self, words: Callable[[str], str]) -> None:
        super().__init__()
        self._words = words

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, Event):
            name, fields = record.msg.name, dict(record.msg.fields)
        else:
            name, fields = "message", {"text": self._words(record.getMessage())}
        fields["logger"] = record.name
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json_line(record.levelname.lower(), name, fields, record.created)


class _Text(TextFormatter):
    """As `TextFormatter`, but for the audit log."""

    def format(self, record: logging.LogRecord) -> str:
        if record.name == AUDIT:
            return _Json(self._words).format(record)
        return super().format(record)


def _shown(name: str, value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    # What looks like two fields is quoted, and principals: a certificate may have anything there.
    if name == "principal" or not text or re.search(r"[\s\"]", text):
        text = json.dumps(text, ensure_ascii=False)
    return f"{name}={text}"
