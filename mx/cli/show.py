"""`mx config show`: each setting, its value, and where it comes from."""

from __future__ import annotations

import typer
from rich.table import Table

from mx import config
from mx.cli import options, outcome
from mx.cli.commands import Command, Group
from mx.cli.words import in_flags
from mx.config_values import without_password

app = typer.Typer(
    name="config", cls=Group, help="Settings and where they come from.", no_args_is_help=True
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
    table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
    for name, about in names.items():
        style = "bold" if settings.is_set(name) else ""
        value = config.format_value(shown(name))
        table.add_row(name, value, settings.origin(name), in_flags(about.text), style=style)
    outcome.show(table)
