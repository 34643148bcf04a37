"""The example of a router, in a process."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from tests.support.commands import environment
from tests.support.daemon import ROOT


class Router:
    """examples/router.py in a process."""

    def __init__(self, *arguments: str) -> None:
        self.said = ""
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "router.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(PYTHONUNBUFFERED="1"),
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.until(lambda: "the page: http://" in self.said, "address")
        self.address = self.said.partition("the page: http://")[2].partition("/")[0]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def until(self, found: Any, what: str) -> Any:
        deadline_s = time.monotonic() + 60
        while not (value := found()):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline_s, f"no {what}:\n{self.said}"
            time.sleep(0.05)
        return value

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def replicas(self) -> list[dict[str, Any]]:
        status, body = self.ask("GET", "/replicas")
        assert status == 200
        found = json.loads(body)["replicas"]
        return [each for each in found if not each["origin"]]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait()
            self._reader.join(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
