"""What examples/router.py shows by itself: a coordinator, a source that is slow on purpose, and
replicas that come and go, all on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
import tempfile
import textwrap
from collections import Counter
from pathlib import Path
from typing import Self

import children
import router_http as http

LAYERS = 12
WIDTH = 1024
BANDWIDTH = "4MB/s"
QUIET = ("--log-level", "warning")
#: Pause between requests, and between the acts of the demonstration.
REQUEST_EVERY_S = 0.5
ACT_S = 3.0


def write_checkpoint(path: Path) -> None:
    """Write a model of 12 layers and 25 MB as one safetensors file, without torch."""
    nbytes = 2 * WIDTH * WIDTH
    header = {
        f"model.layers.{n}.mlp.up_proj.weight": {
            "dtype": "BF16",
            "shape": [WIDTH, WIDTH],
            "data_offsets": [n * nbytes, (n + 1) * nbytes],
        }
        for n in range(LAYERS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for n in range(LAYERS):
            file.write(bytes((n + i) % 251 for i in range(4096)) * (nbytes // 4096))


class Demo:
    """The processes of the demonstration; an async context manager. `coordinator` is the address
    of theirs."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.coordinator = ""
        self._folder = tempfile.TemporaryDirectory(prefix="mx-router-")
        self._log = Path(self._folder.name) / "log"
        self._errors = self._log.open("wb")
        self._processes: list[asyncio.subprocess.Process] = []
        self._answered: Counter[str] = Counter()
        self._has_told_early = False

    async def __aenter__(self) -> Self:
        try:
            path = Path(self._folder.name) / "model.safetensors"
            write_checkpoint(path)
            self.coordinator = f"127.0.0.1:{await _free_port()}"
            entry = "from mx.cli import coordinator_main; coordinator_main()"
            await self._start("-c", entry, "--listen", self.coordinator, *QUIET)
            source = await self._start(
                "-m", "mx", "serve", str(path), "--model", self.model, "--max-bandwidth", BANDWIDTH,
                "--coordinator", self.coordinator, "--wait", "30", "--json", *QUIET,
            )  # fmt: skip
            assert source.stdout is not None
            # It says what it serves once it does.
            if not await source.stdout.readline():
                print(self._log.read_text(), end="", file=sys.stderr)
                raise SystemExit("error: the demonstration's source did not start")
            tell(
                f"a source serves {self.model}: {LAYERS} layers, 25 MB, {BANDWIDTH} at most, so "
                "that a replica loads for some seconds"
            )
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.communicate()
        self._errors.close()
        self._folder.cleanup()

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *children.command(sys.executable, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
        )
        self._processes.append(process)
        return process

    async def _replica(self) -> asyncio.subprocess.Process:
        script = str(Path(__file__).with_name("router_replica.py"))
        return await self._start(script, self.model, "--coordinator", self.coordinator)

    async def play(self, router: str) -> None:
        """Start a replica, later another, end the first, and send requests all the time."""
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(self._ask(router))
            tell("the first replica starts; a request is sent every half second")
            first = await self._replica()
            await self._until_loaded(router, 1)
            self._told("the first replica is loaded")
            await asyncio.sleep(ACT_S)
            tell("a second replica starts")
            await self._replica()
            await self._until_loaded(router, 2)
            self._told("the second replica is loaded")
            await asyncio.sleep(ACT_S)
            tell("the first replica is killed")
            first.kill()
            await asyncio.sleep(ACT_S)
            self._told("the second replica goes on")
            tell("requests go on as long as this runs: see the page; Ctrl-C ends it")
            await asking

    async def _ask(self, router: str) -> None:
        """Send a request every half second, whether or not the last one was answered."""
        async with asyncio.TaskGroup() as tasks:
            number = 0
            while True:
                number += 1
                tasks.create_task(self._one(router, number))
                await asyncio.sleep(REQUEST_EVERY_S)

    async def _one(self, router: str, number: int) -> None:
        body = json.dumps({"prompt": f"request {number}"}).encode()
        try:
            answer = json.loads(await http.post(router, "/generate", body))
        except (OSError, EOFError, ValueError):
            self._answered["not taken"] += 1
            return
        early = answer["layers_at_begin"] < answer["layers"]
        self._answered["early" if early else "later"] += 1
        if early and not self._has_told_early:
            self._has_told_early = True
            tell(
                f"request {number}: began with {answer['layers_at_begin']} of {answer['layers']} "
                f"layers, answered after {answer['waited_s']} s, as soon as the last one was there"
            )

    def _told(self, what: str) -> None:
        """Tell of an act, and of the requests since the last one."""
        counts, self._answered = self._answered, Counter()
        early = counts["early"]
        tell(
            f"{what}; requests meanwhile: {early + counts['later']} answered, {early} of them "
            f"begun before all layers were there, {counts['not taken']} taken by no replica"
        )

    @staticmethod
    async def _until_loaded(router: str, count: int) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, ValueError):
                found = json.loads(await http.get(router, "/replicas"))["replicas"]
                if sum(each["fully_loaded"] and not each["origin"] for each in found) >= count:
                    return
            await asyncio.sleep(0.2)


def tell(text: str) -> None:
    """Print it at once, in lines that fit a terminal."""
    print(textwrap.fill(text, 79, subsequent_indent="  "), flush=True)


async def _free_port() -> int:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        return int(server.sockets[0].getsockname()[1])
