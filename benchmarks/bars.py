"""Draws times as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .svg import INK, document, rectangle, text

MX, OTHER, BOUND = "#1f83e0", "#7a8794", "#2e9a5b"
WIDTH, LEFT, RIGHT = 960, 300, 60
ROW, BAR, TOP = 30, 20, 56


@dataclass(frozen=True)
class Bar:
    """One bar: what was timed, and its seconds."""

    what: str
    seconds: float
    color: str = OTHER


def picture(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Return a picture of groups of bars, all on one scale from 0."""
    longest = max(bar.seconds for _, bars in groups for bar in bars)
    parts, y = [], float(TOP)
    for name, bars in groups:
        parts.append(text(24, y + 14, name, INK, size=14))
        y += ROW
        for bar in bars:
            width = (WIDTH - LEFT - RIGHT) * bar.seconds / longest
            bold = bar.color == MX
            label = text(LEFT - 12, y + 15, bar.what, bar.color, 13, "end", bold=bold)
            seconds = text(LEFT + width + 8, y + 15, f"{bar.seconds:.2f} s", INK, size=13)
            parts += [label, rectangle(LEFT, y, width, BAR, bar.color), seconds]
            y += ROW
        y += ROW / 3
    return document(title, WIDTH, y + 10, parts)
