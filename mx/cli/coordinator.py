"""`mx-coordinator`: the daemon that lists models and their sources."""

from __future__ import annotations

import typer

from mx import packs
from mx.cli import options, outcome
from mx.cli.commands import Command
from mx.coordinator import daemon
from mx.core.budget import Limits
from mx.wire.address import tls_of

app = typer.Typer(
    name="mx-coordinator",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command)
@options.takes_settings
def coordinator(
    context: typer.Context,
    *,
    as_json: bool,
    version: options.Version = False,
) -> None:
    """List which source holds which layers of which model.

    No weights pass through it, and pulls that run outlive it. Beyond this machine it
    requires mutual TLS, or `--insecure`.

    **Examples**

    - `mx-coordinator`

    - `mx-coordinator --listen 10.0.0.1:7600 --tls-cert me.pem --tls-key me.key
      --tls-ca ours.pem`
    """
    settings = options.settings_of(context, runs_long=True, level="info")
    outcome.ignore_hangup()

    def listening(address: str) -> None:
        if as_json:
            outcome.emit({"listen": address, "lease_s": settings.lease_s})
        outcome.say(f"mx-coordinator listens on {address}; stop with Ctrl-C")
        packs.tell("ready", f"listening on {address}")

    code = daemon.run(
        settings.fill(
            daemon.CoordinatorOptions,
            listen=settings.coordinator_listen,
            tls=tls_of(settings),
            limits=Limits.of(settings.control_memory, settings.max_request),
            state_settings=settings.added,
            receipt_key_named=options.named(settings, "receipt_key"),
        ),
        listening,
        lambda coordinator: options.accompanied(settings, coordinator),
        lambda: packs.tell("stopping"),
    )
    raise typer.Exit(code)


if __name__ == "__main__":
    from mx.cli import coordinator_main

    coordinator_main()
