"""`mx config show`: each setting, its value, and where it comes from."""

from __future__ import annotations

from collections.abc import Iterable

import typer
from rich.text import Text

from mx import config
from mx.cli import options, outcome
from mx.cli.commands import Command, VerbGroup
from mx.cli.printing import Column, table_of
from mx.cli.words import in_flags
from mx.config_values import without_password

#: Wider lines are hard to read, in a file too.
_MOST_COLUMNS = 120

app = typer.Typer(
    name="config", cls=VerbGroup, help="Settings and where they come from.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Settings and where they come from."""


@app.command("show", cls=Command)
@options.takes_settings
def show(
    context: typer.Context,
    *,
    as_json: bool,
) -> None:
    """Show every setting, its value and where that comes from.

    A flag beats the environment (MX_PEER_COORDINATOR=...), that beats the file, that beats the
    default. The names shown are those of the file; in the environment they are in capitals
    behind MX_PEER_.

    **Example**

    - `MX_PEER_STREAMS=4 mx config show --config cluster.toml`
    """
    settings = options.settings_of(context)
    names = config.DESCRIPTIONS

    def shown(name: str) -> object:
        return without_password(getattr(settings, name))

    if as_json:
        outcome.emit({n: {"value": shown(n), "origin": settings.origin(n)} for n in names})
        return
    styles = ["bold" if settings.is_set(name) else "" for name in names]

    def styled(texts: Iterable[str]) -> list[Text]:
        return [Text(text, style) for text, style in zip(texts, styles, strict=True)]

    page = outcome.page()
    columns = [
        Column("setting", styled(names)),
        Column("value", styled(config.format_value(shown(name)) for name in names), folds=16),
        Column("from", styled(map(settings.origin, names)), folds=12),
        Column("meaning", styled(in_flags(about.text) for about in names.values()), folds=24),
    ]
    page.width = min(page.width, _MOST_COLUMNS)
    outcome.show(table_of(columns, page.width), page)
