"""Draws the simulated swarm as plain SVG, without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .svg import INK, document, dot, line, text
from .swarm_setting import Row, Setting

#: Colours of medium lightness, visible on white and on black.
COLORS = {
    "star": "#d1495b",
    "tree": "#b07d00",
    "naive": "#8e6fd8",
    "rarest": "#2e9a5b",
    "chain": "#7a8794",
    "ours": "#1f83e0",
}
NAMES = {
    "star": "all from the origin",
    "tree": "binomial tree",
    "naive": "naive swarm",
    "rarest": "rarest first",
    "chain": "chain",
    "ours": "mx",
}
WIDTH, HEIGHT = 960, 430
LABEL_PX = 15  # the least distance between two labels
#: Shifts of labels away from the bold line.
SHIFT_PX = {"chain": -9, "rarest": 10}


@dataclass(frozen=True)
class Panel:
    """A diagram with two logarithmic axes."""

    title: str
    left: float
    value: Callable[[Row], float]
    lowest: float
    highest: float
    ticks: tuple[float, ...]
    top: float = 84
    width: float = 392
    height: float = 280

    def x(self, n: float) -> float:
        return self.left + self.width * math.log(n) / math.log(1000)

    def y(self, value: float) -> float:
        part = math.log(value / self.lowest) / math.log(self.highest / self.lowest)
        return self.top + self.height * (1 - part)

    def draw(self, rows: Sequence[Row]) -> list[str]:
        bottom = self.top + self.height
        parts = [text(self.left, self.top - 16, self.title, INK, size=14)]
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(line([(self.left, y), (self.left + self.width, y)], INK, 0.6, 0.35))
            parts.append(text(self.left - 8, y + 4, f"{tick:g}", INK, anchor="end"))
        for n in (1, 3, 10, 31, 100, 300, 1000):
            parts.append(text(self.x(n), bottom + 20, f"{n:,}", INK, anchor="middle"))
        parts.append(text(self.left + self.width, bottom + 40, "receivers", INK, anchor="end"))
        labels: list[tuple[float, float, str]] = []
        for policy, color in COLORS.items():
            values = sorted(
                (row.setting.n, self.value(row)) for row in rows if row.setting.policy == policy
            )
            if not values:
                continue
            points = [(self.x(n), self.y(value)) for n, value in values]
            bold = policy == "ours"
            parts.append(line(points, color, 3.5 if bold else 2))
            parts += [dot(x, y, color, 3.6 if bold else 2.6) for x, y in points]
            x, y = points[-1]
            if bold:
                parts.append(text(x, y - 12, NAMES[policy], color, 15, "end", bold=True))
            else:
                labels.append((y + SHIFT_PX.get(policy, 0), x, policy))
        above = -math.inf
        for y, x, policy in sorted(labels):
            above = max(y + 4, above + LABEL_PX)
            parts.append(text(x + 10, above, NAMES[policy], COLORS[policy]))
        return parts


def picture(rows: Sequence[Row]) -> str:
    """Return a picture of the rows that differ only in receivers and policy."""
    usual = Setting()
    drawn = [
        row
        for row in rows
        if replace(row.setting, n=usual.n, policy=usual.policy, seed=usual.seed) == usual
    ]
    nbytes = usual.k * usual.chunk_nbytes
    title = (
        f"N pulls at once from one origin: {nbytes / 2**30:g} GiB in {usual.k} chunks, "
        f"{usual.gbit_per_s:g} Gbit/s links (simulated)"
    )
    panels = [
        Panel(
            "the last one is done, x one pull",
            56,
            lambda row: row.outcome.finish,
            0.9,
            34,
            (1, 2, 4, 8, 16, 32),
        ),
        Panel(
            "first quarter in order, x one pull (mean)",
            536,
            lambda row: row.outcome.quarter,
            0.225,
            8.5,
            (0.25, 0.5, 1, 2, 4, 8),
        ),
    ]
    return document(title, WIDTH, HEIGHT, [part for panel in panels for part in panel.draw(drawn)])
