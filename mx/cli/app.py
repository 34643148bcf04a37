"""The `mx` command: its verbs, one module each, which is imported when its verb is asked for."""

from __future__ import annotations

from typing import Any

import typer

from mx.cli import options
from mx.cli.commands import Command, VerbGroup

#: The kernel's verbs, in the order of the help, before those of packs: where each is.
VERBS = {
    "serve": "mx.cli.serve:serve",
    "pull": "mx.cli.pull:pull",
    "plan": "mx.cli.plan:plan",
    "verify": "mx.cli.verify:verify",
    "models": "mx.cli.listing:models",
    "sources": "mx.cli.listing:sources",
    "keygen": "mx.cli.keygen:keygen",
    "config": "mx.cli.show:app",
}


def _verbs() -> dict[str, str]:
    from mx import packs  # `mx --version` needs none

    found = dict(VERBS)
    for pack in packs.packs().values():
        found = {**pack.verbs, **found}
    return found


class Verbs(VerbGroup):
    """The verbs, each imported for the command that names it; the help imports all."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all verbs, in the order of the help."""
        return list(dict.fromkeys([*VERBS, *sorted(_verbs())]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a verb; None if there is none of this name."""
        if cmd_name not in self.commands and (at := _verbs().get(cmd_name)):
            self.commands[cmd_name] = _verb(cmd_name, at)
        return self.commands.get(cmd_name)


def _verb(name: str, at: str) -> Any:
    from mx.packs import load

    found: Any = load(at)
    alone = typer.Typer(rich_markup_mode="markdown", pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, cls=Command)(found)
    return typer.main.get_group(alone).commands[name]


app = typer.Typer(
    name="mx",
    cls=Verbs,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""**Start here**

- `mx demo`  shows everything at once, on this machine

- `mx serve /models/llama-8b --model llama-8b`  on the machine that has it

- `mx pull llama-8b --out /models/copy`  in another terminal (the README has other machines)

**Exit codes**: 0 complete · 1 anything else · 2 usage or configuration · 3 no source ·
4 integrity · 5 not allowed · 6 incomplete · 130 interrupted ·
143 ended by SIGTERM""",
)


@app.callback()
def root(
    version: options.Version = False,
) -> None:
    """Move a model's weights from a machine that holds them into one that needs them.

    Layer by layer, each verified, over shared memory or TCP; every machine that has received
    a model can pass it on.
    """
