"""`mx web` for tests: started, and asked."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.support.commands import Command, Run, free_port


def start_web(run: Run, coordinator: str, *more: str) -> tuple[str, Command]:
    """Start `mx web`; return the page's URL, and the command."""
    command = run("web", "--coordinator", coordinator, "--listen", f"127.0.0.1:{free_port()}",
                  "--json", *more)  # fmt: skip
    return str(command.json()["url"]), command


def until(holds: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:g} s"
        time.sleep(0.1)


def get(
    url: str, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Return the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()
