"""`mx-coordinator`: the daemon that lists models and their sources."""

from __future__ import annotations

from typing import Annotated

import typer

from mx.cli import options, outcome
from mx.cli.commands import Command
from mx.coordinator import daemon

app = typer.Typer(
    name="mx-coordinator",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(cls=Command)
def coordinator(
    context: typer.Context,
    coordinator_listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help="Where to listen; port 0 takes a free one. (default: 127.0.0.1:7600)",
            metavar="HOST:PORT",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(help="Where to keep what is registered. (default: memory)", metavar="memory"),
    ] = None,
    lease_s: Annotated[
        str | None,
        typer.Option(
            help="How long a source stays listed without a heartbeat. (default: 5)",
            metavar="TIME",
        ),
    ] = None,
    receipt_key: Annotated[
        str | None,
        typer.Option(
            help="The key by which it knows names and their owners again after a restart; made at "
            "first use. (default: ~/.local/state/mx/receipt.key)",
            metavar="FILE",
        ),
    ] = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_ca: options.TlsCa = None,
    insecure: options.Insecure = None,
    config: options.ConfigFile = None,
    as_json: options.Json = False,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    debug: options.Debug = False,
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

    code = daemon.run(
        daemon.Options(
            listen=settings.coordinator_listen,
            tls=options.tls_of(settings),
            insecure=settings.insecure,
            state=settings.state,
            lease_s=settings.lease_s,
            receipt_key=settings.receipt_key,
            receipt_key_named=options.named(settings, "receipt_key"),
        ),
        listening,
    )
    raise typer.Exit(code)


if __name__ == "__main__":
    from mx.cli import coordinator_main

    coordinator_main()
