"""`mx config show`: each setting, its value, and where it comes from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from mx import config
from mx.cli import options, outcome
from mx.cli.commands import Command, Group

app = typer.Typer(
    name="config", cls=Group, help="Settings and where they come from.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Settings and where they come from."""


@app.command("show", cls=Command)
def show(
    context: typer.Context,
    coordinator: options.Coordinator = None,
    listen: options.Listen = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = None,
    config_file: Annotated[
        str | None,
        typer.Option("--config", help="Settings in TOML.", metavar="FILE"),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show every setting, its value and where that comes from.

    A flag beats the environment (MX_PEER_COORDINATOR=...), that beats the file, that beats the
    default. The names shown are those of the file; in the environment they are in capitals
    behind MX_PEER_.

    **Example**

    - `MX_PEER_STREAMS=4 mx config show --config cluster.toml`
    """
    settings = options.settings_of(context)
    names = config.setting_names()
    if as_json:
        outcome.emit(
            {n: {"value": getattr(settings, n), "origin": settings.origin(n)} for n in names}
        )
        return
    table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
    for name in names:
        style = "bold" if settings.is_set(name) else ""
        value = config.format_value(getattr(settings, name))
        table.add_row(name, value, settings.origin(name), config.describe(name), style=style)
    outcome.show(table)
