"""`mx web`: what a coordinator knows, live in a browser."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import typer

from mx.cli import additions, options, outcome
from mx.config import Settings
from mx.errors import ConfigError, install_hint
from mx.tasks import require_thread_room
from mx.wire.address import tls_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp


@runtime_checkable
class WebAddition(Protocol):
    """What a pack adds to `mx web`: `Pack.additions` names it."""

    def answers(
        self, settings: Settings, headers: Mapping[str, str]
    ) -> AbstractContextManager[Mapping[str, ASGIApp]]:
        """Return a context manager that yields, by path, what answers there while the page is
        served. Requests have been admitted; `headers` are those of each answer."""


@options.takes_settings
def web(context: typer.Context, *, as_json: bool) -> None:
    """Show models, sources and running pulls in a browser, until Ctrl-C.

    Each pull with its layers as they fill up, each source with what it serves, and who
    reads from whom. The page can only be read. Beyond this machine it requires mutual
    TLS, which a browser has to have a certificate for, or `--insecure`.

    **Examples**

    - `mx web`

    - `mx web --coordinator 10.0.0.1:7600 --listen 127.0.0.1:8080 --tls-cert me.pem
      --tls-key me.key --tls-ca ours.pem`
    """
    settings = options.settings_of(context, runs_long=True, level="info")
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise ConfigError(
            "the page needs starlette and uvicorn, which are not installed",
            hint=install_hint("web"),
        )
    from mx.operations.web import server

    of_packs = additions.of("web", additions.VerbAddition)
    added = [each for each in of_packs if isinstance(each, WebAddition)]

    outcome.ignore_hangup()

    def listening(url: str) -> None:
        if as_json:
            outcome.emit({"url": url, "coordinator": settings.coordinator})
        outcome.say(f"the page is at {url}; stop with Ctrl-C")

    async def serve() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        await server.serve(
            settings.fill(
                server.WebOptions,
                listen=settings.value("web_listen"),
                tls=tls_of(settings),
                timeout_s=settings.connect_timeout_s,
                more=[functools.partial(each.answers, settings) for each in added],
            ),
            stop,
            listening,
        )

    require_thread_room()
    asyncio.run(serve())
