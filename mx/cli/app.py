"""The `mx` command: its verbs, one module each."""

from __future__ import annotations

import typer

from mx.cli import (
    artifacts,
    bench,
    cache,
    demo,
    doctor,
    keygen,
    listing,
    options,
    plan,
    pull,
    serve,
    show,
    top,
    topo,
    verify,
    web,
)
from mx.cli.commands import Command, Group

app = typer.Typer(
    name="mx",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""**Start here**

- `mx demo`  shows everything at once, on this machine

- `mx serve /models/llama-8b --model llama-8b`  on the machine that has it

- `mx pull llama-8b --out /models/copy`  in another terminal (the README has other machines)

**Exit codes**: 0 complete · 1 anything else · 2 usage or configuration · 3 no source ·
4 integrity · 5 not allowed · 6 incomplete · 130 interrupted""",
)


@app.callback()
def root(
    version: options.Version = False,
) -> None:
    """Move a model's weights from a machine that holds them into one that needs them.

    Layer by layer, each verified, over shared memory or TCP; every machine that has received
    a model can pass it on.
    """


app.command("serve", cls=Command)(serve.serve)
app.command("pull", cls=Command)(pull.pull)
app.command("plan", cls=Command)(plan.plan)
app.command("verify", cls=Command)(verify.verify)
app.command("models", cls=Command)(listing.models)
app.command("sources", cls=Command)(listing.sources)
app.command("cache", cls=Command)(cache.cache)
app.command("top", cls=Command)(top.top)
app.command("web", cls=Command)(web.web)
app.command("topo", cls=Command)(topo.topo)
app.command("doctor", cls=Command)(doctor.doctor)
app.command("demo", cls=Command)(demo.demo)
app.command("keygen", cls=Command)(keygen.keygen)
app.command("bench", cls=Command)(bench.bench)
app.add_typer(artifacts.app, name="artifacts")
app.add_typer(show.app, name="config")
