"""Printing tables without the control characters that steer a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mx.text import plain_lines


class Plain:
    """A table or another thing that rich renders, its text without control characters."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            if segment.control is None:
                segment = segment._replace(text=plain_lines(segment.text))
            yield segment
