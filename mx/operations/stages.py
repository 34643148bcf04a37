"""Shows where a pull that read a store has spent its time."""

from __future__ import annotations

from collections.abc import Sequence

from mx.cli import outcome
from mx.cli.printing import Column, table_of
from mx.fetching.report import StageReport
from mx.units import format_rate, format_seconds

#: The length of the longest bar.
_CELLS = 30


def show(stages: Sequence[StageReport]) -> None:
    """Write a line for each stage of each drive, with a bar: its share of the longest one."""
    console = outcome.page()
    sign = "#" if console.options.ascii_only else "█"
    most_s = max((each.seconds for each in stages), default=0.0) or 1.0

    def rate(each: StageReport) -> str:
        return "" if each.gb_per_s is None else format_rate(1e9 * each.gb_per_s)

    columns: Sequence[Column[StageReport]] = (
        Column("", "drive", lambda each: each.drive),
        Column("", "stage", lambda each: each.stage),
        Column("", "in all threads", lambda each: each.seconds, format_seconds, right=True),
        Column("", "by each", rate, right=True),
        Column("", "share", lambda each: sign * round(_CELLS * each.seconds / most_s)),
    )
    outcome.show(table_of(columns, stages, console.width), console)
