"""A real Redis on a free port, which tests stop, fill and start anew."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest

from mx.redis_state.link import RedisLink
from tests.support.commands import free_port

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


class RedisServer:
    """One server, in a folder of its own. It keeps nothing on disk, unless the options say so."""

    def __init__(self, *options: str) -> None:
        self.folder = tempfile.mkdtemp(prefix="mx-redis-")
        self.port = free_port()
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self._prefixes = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def fresh_url(self) -> str:
        """The URL of a state of its own."""
        self._prefixes += 1
        return f"{self.url}?prefix=t{self._prefixes}"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [
                "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir",
                self.folder, "--save", "", "--loglevel", "warning", *self._options,
            ],
            stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        give_up_s = time.monotonic() + 30
        while self.ask("PING") != "+PONG":
            assert self._process.poll() is None, "redis-server has ended"
            assert time.monotonic() < give_up_s
            time.sleep(0.01)

    def ask(self, *words: str) -> str:
        """Send a command on a connection of its own, and return the first line of the answer."""
        said = f"*{len(words)}\r\n" + "".join(f"${len(w.encode())}\r\n{w}\r\n" for w in words)
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                connection.sendall(said.encode())
                return connection.recv(4096).decode().partition("\r\n")[0]
        except OSError:
            return ""

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A running server."""
    server = RedisServer(*options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def patience(answer_s: float = 10.0) -> Iterator[None]:
    """Let Redis answer this process so late: either may have no processor for a second."""
    with pytest.MonkeyPatch.context() as patches:
        answering = RedisLink.answering.__wrapped__  # type: ignore[attr-defined]
        patches.setattr(answering, "__defaults__", (answer_s,))
        yield
