"""The `mx` command: its verbs, one module each."""

from __future__ import annotations

from typing import Annotated

import typer

from mx.cli import bench, demo, listing, plan, pull, serve, show, top, topo

app = typer.Typer(
    name="mx",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""**Start here**

- `mx demo`  shows everything at once, on this machine

- `mx serve /models/llama-8b --model llama-8b`  on the machine that has it

- `mx pull llama-8b --coordinator HOST:7600 --out /models/llama-8b`  where it is needed

**Exit codes**: 0 complete · 1 anything else · 2 usage or configuration · 3 no source ·
4 integrity · 5 not allowed · 6 incomplete · 130 interrupted""",
)


def _version(wanted: bool) -> None:
    if wanted:
        import mx

        print(f"mx {mx.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", is_eager=True, callback=_version
        ),
    ] = False,
) -> None:
    """Move a model's weights from a machine that holds them into one that needs them.

    Layer by layer, each verified, over shared memory or TCP; every machine that has received
    a model can pass it on.
    """


app.command("serve")(serve.serve)
app.command("pull")(pull.pull)
app.command("plan")(plan.plan)
app.command("models")(listing.models)
app.command("sources")(listing.sources)
app.command("top")(top.top)
app.command("topo")(topo.topo)
app.command("demo")(demo.demo)
app.command("bench")(bench.bench)
app.add_typer(show.app, name="config")
