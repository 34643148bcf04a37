"""What is printed and logged, without what steers a terminal."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import TracebackType
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mx.text import plain, plain_lines

_ErrorInfo: TypeAlias = (
    tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
)


class Plain:
    """A table or another thing that rich renders, its text without control characters."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            if segment.control is None:
                segment = segment._replace(text=plain_lines(segment.text))
            yield segment


class PlainFormatter(logging.Formatter):
    """Log records, each on one line but for the traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return plain(super().formatMessage(record))

    def formatException(self, ei: _ErrorInfo) -> str:
        return plain_lines(super().formatException(ei))
