"""Printing tables: as wide as the terminal, without the control characters that steer it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mx.text import plain_lines

#: Between two columns.
_GAP = 2
#: A column of names may be folded to this.
NAMES = 24


class Plain:
    """A table or another thing that rich renders, its text without control characters."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._shown, options):
            if segment.control is None:
                segment = segment._replace(text=plain_lines(segment.text))
            yield segment


@dataclass
class Column:
    """A column of a table that a terminal may be too narrow for.

    Attributes:
        name: What its head says.
        cells: Its texts, one for each row; each may have a style.
        right: True aligns it to the right.
        folds: The width below which its texts are not broken into lines; 0: none ever is, unless
            a terminal is too narrow for what is never left out.
        spare: Columns of the highest number are left out first; 0 is never left out.
    """

    name: str
    cells: Sequence[str | Text]
    right: bool = False
    folds: int = 0
    spare: int = 0

    @property
    def least_width(self) -> int:
        """The cells that it takes at least."""
        widths = [cell_len(str(cell)) for cell in (self.name, *self.cells)]
        return min(self.folds or max(widths), max(widths))


def fitted(text: str, width: int) -> str:
    """Return a text whose lines are broken at spaces where they are longer than `width`; a word
    that is longer, such as a pin, is not broken."""
    broken = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = text.split("\n")
    return "\n".join(line if cell_len(line) <= width else broken.fill(line) for line in lines)


def table_of(columns: Sequence[Column], width: int) -> Table:
    """Return a table of those columns for which there is room.

    Args:
        columns: All of them, in their order.
        width: The terminal's, in cells.
    """
    kept = [*columns]
    while not (fits := sum(column.least_width + _GAP for column in kept) - _GAP <= width):
        spare = max(kept, key=lambda column: column.spare)
        if not spare.spare:
            break
        kept.remove(spare)
    table = Table(box=None, pad_edge=False)
    for column in kept:
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=fits and not column.folds,
        )
    for cells in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*(Text(each) if isinstance(each, str) else each for each in cells))
    return table


def spaced(text: str) -> str:
    """Return a processing key so that a terminal may break it between its fields. It is still read
    as the same."""
    return text.replace(",", ", ") if "=" in text else text
