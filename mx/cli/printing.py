"""Printing tables: as wide as the terminal, without the control characters that steer it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mx.cli import outcome
from mx.text import plain_lines

_Row = TypeVar("_Row")

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


def _same(value: object) -> object:
    return value


@dataclass(frozen=True)
class Column(Generic[_Row]):
    """A field of rows: in their objects of `--json`, in a table that a terminal may be too narrow
    for, or in both.

    Attributes:
        key: Its name in an object; "": it is not there.
        title: What its head says in a table; "": it is not there.
        value: Returns what a row has in it.
        shown: Returns what a table shows of a value: a text, maybe with a style, or a number.
        right: True aligns it to the right.
        folds: The width below which its texts are not broken into lines; 0: none ever is, unless
            a terminal is too narrow for what is never left out.
        spare: Columns of the highest number are left out first; 0 is never left out.
    """

    key: str
    title: str
    value: Callable[[_Row], Any]
    shown: Callable[[Any], object] = _same
    right: bool = False
    folds: int = 0
    spare: int = 0

    def cells(self, rows: Sequence[_Row]) -> list[Text]:
        """Return the texts that a table shows of rows."""
        shown = (self.shown(self.value(row)) for row in rows)
        return [each if isinstance(each, Text) else Text(str(each)) for each in shown]

    def least_width(self, cells: Sequence[Text]) -> int:
        """Return the width that it takes at least with these texts."""
        widest = max(cell_len(str(cell)) for cell in (self.title, *cells))
        return min(self.folds or widest, widest)


def fitted(text: str, width: int) -> str:
    """Return a text whose lines are broken at spaces where they are longer than `width`; a word
    that is longer, such as a pin, is not broken."""
    broken = textwrap.TextWrapper(
        width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = text.split("\n")
    return "\n".join(line if cell_len(line) <= width else broken.fill(line) for line in lines)


def objects(columns: Sequence[Column[_Row]], rows: Iterable[_Row]) -> list[dict[str, Any]]:
    """Return the objects of rows for `--json`."""
    named = [each for each in columns if each.key]
    return [{each.key: _rounded(each.value(row)) for each in named} for row in rows]


def _rounded(value: object) -> object:
    """Return a value; seconds and rates have three decimal places."""
    return round(value, 3) if isinstance(value, float) else value


def table_of(
    columns: Sequence[Column[_Row]],
    rows: Sequence[_Row],
    width: int,
    overflow: OverflowMethod = "fold",
) -> Table:
    """Return a table of those columns for which there is room.

    Args:
        columns: All of them, in their order.
        rows: What it shows.
        width: The terminal's, in cells.
        overflow: What is done with words that are wider than their column.
    """
    cells = {column: column.cells(rows) for column in columns if column.title}
    kept = {column: column.least_width(texts) for column, texts in cells.items()}
    while not (fits := sum(kept.values()) + _GAP * (len(kept) - 1) <= width):
        spare = max(kept, key=lambda column: column.spare)
        if not spare.spare:
            break
        del kept[spare]
    table = Table(box=None, pad_edge=False)
    for column in kept:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            overflow=overflow,
            no_wrap=fits and not column.folds,
        )
    for texts in zip(*(cells[column] for column in kept), strict=True):
        table.add_row(*texts)
    return table


def show_rows(
    columns: Sequence[Column[_Row]], rows: Sequence[_Row], overflow: OverflowMethod = "fold"
) -> None:
    """Write the table of rows to standard output; the arguments are those of `table_of`."""
    page = outcome.page()
    outcome.show(table_of(columns, rows, page.width, overflow), page)


def spaced(text: str) -> str:
    """Return a processing key so that a terminal may break it between its fields. It is still read
    as the same."""
    return text.replace(",", ", ") if "=" in text else text
