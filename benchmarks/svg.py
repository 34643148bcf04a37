"""Plain SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence

#: Of medium lightness, visible on white and on black.
INK = "#7d8590"


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
