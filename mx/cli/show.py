"""`mx config show`: each setting, its value, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

import typer
from rich.text import Text

from mx import config
from mx.cli import options, outcome
from mx.cli.commands import Command, VerbGroup
from mx.cli.printing import Column, table_of
from mx.cli.words import in_flags
from mx.config import Settings
from mx.config_values import SettingDescription, format_value, without_password

#: Wider lines are hard to read, in a file too.
_MOST_COLUMNS = 120

_COLUMNS: Sequence[Column[Sequence[Text]]] = (
    Column("", "setting", itemgetter(0)),
    Column("", "value", itemgetter(1), folds=16),
    Column("", "from", itemgetter(2), folds=12),
    Column("", "meaning", itemgetter(3), folds=24),
)

app = typer.Typer(
    name="config", cls=VerbGroup, help="Settings and where they come from.", no_args_is_help=True
)


@app.callback()
def root() -> None:
    """Settings and where they come from."""


@app.command("show", cls=Command)
@options.takes_settings
def show(
    settings: Settings,
    *,
    as_json: bool,
) -> None:
    """Show every setting, its value and where that comes from.

    A flag beats the environment (MX_PEER_COORDINATOR=...), that beats the file, that beats the
    default. The names shown are those of the file; in the environment they are in capitals
    behind MX_PEER_. The file is that of `--config`, of MX_PEER_CONFIG, or the default one.

    **Example**

    - `MX_PEER_STREAMS=4 mx config show --config cluster.toml`
    """
    names = config.descriptions()

    def shown(name: str) -> object:
        return without_password(settings.value(name))

    is_there = Path(settings.file).exists()
    if as_json:
        file = {"path": settings.file, "read": is_there}
        found = {n: {"value": shown(n), "origin": settings.origin(n)} for n in names}
        outcome.emit({"config_file": file, **found})
        return
    about_file = "It was read." if is_there else "There is none."
    rows = [tuple(map(Text, ("(file)", settings.file, "", about_file)))]
    for name, about in names.items():
        value, is_set = format_value(shown(name)), settings.is_set(name)
        meaning = _meaning(about, shows_default=bool(value) and not is_set)
        texts = (name, value, settings.origin(name), meaning)
        rows.append(tuple(Text(each, "bold" if is_set else "") for each in texts))
    page = outcome.page()
    page.width = min(page.width, _MOST_COLUMNS)
    outcome.show(table_of(_COLUMNS, rows, page.width), page)


def _meaning(about: SettingDescription, *, shows_default: bool) -> str:
    """Return a setting's description, without its default where that is shown as its value. What
    a default means is always said: 0 may be "no limit"."""
    before, marker, _ = about.text.rpartition(" (default: ")
    is_said = shows_default and marker and not about.unset
    return in_flags(before if is_said else about.text)
