"""Plain SVG, without a library, and times as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Of medium lightness, visible on white and on black.
INK = "#7d8590"
MX, OTHER, BOUND = "#1f83e0", "#7a8794", "#2e9a5b"
_WIDTH, _LEFT, _RIGHT = 960, 300, 60
_ROW, _BAR, _TOP = 30, 20, 56


def document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return a picture with its title in the top left corner."""
    body = "\n".join([text(24, 32, title, INK, size=16), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{title}">\n{body}\n</svg>\n'
    )


def text(
    x: float,
    y: float,
    text: str,
    color: str,
    size: int = 12,
    anchor: str = "start",
    *,
    bold: bool = False,
) -> str:
    """Return a line of text."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" '
        f'text-anchor="{anchor}"{weight}>{text}</text>'
    )


def line(
    points: Sequence[tuple[float, float]], color: str, width: float, opacity: float = 1.0
) -> str:
    """Return a line through points."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
    )


def dot(x: float, y: float, color: str, radius: float) -> str:
    """Return a dot."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"/>'


def rectangle(x: float, y: float, width: float, height: float, color: str) -> str:
    """Return a filled rectangle."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}" fill="{color}" '
        'rx="2"/>'
    )


@dataclass(frozen=True)
class Bar:
    """One bar: what was measured, and how much it is: seconds, unless `bars` says otherwise."""

    what: str
    seconds: float
    color: str = OTHER


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], *, unit: str = " s") -> str:
    """Return a picture of groups of bars, all on one scale from 0."""
    longest = max(bar.seconds for _, group in groups for bar in group)
    parts, y = [], float(_TOP)
    for name, group in groups:
        parts.append(text(24, y + 14, name, INK, size=14))
        y += _ROW
        for bar in group:
            width = (_WIDTH - _LEFT - _RIGHT) * bar.seconds / longest
            bold = bar.color == MX
            label = text(_LEFT - 12, y + 15, bar.what, bar.color, 13, "end", bold=bold)
            seconds = text(_LEFT + width + 8, y + 15, f"{bar.seconds:.2f}{unit}", INK, size=13)
            parts += [label, rectangle(_LEFT, y, width, _BAR, bar.color), seconds]
            y += _ROW
        y += _ROW / 3
    return document(title, _WIDTH, y + 10, parts)
