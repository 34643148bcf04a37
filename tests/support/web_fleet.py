"""A fleet that a coordinator lists and the page of `mx web` shows: sources and pulls that only say
that they are, each with its own heartbeats and reports, in one process.

python -m tests.support.web_fleet COORDINATOR --sources 1000 --pulls 300
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import uuid
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.coordinator_load import LAYERS, SECRET, manifest_of, record_of
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey, Registration, SourceRecord
from mx.errors import MxError
from mx.wire.client import CoordinatorClient

#: A connection has at most 100 streams.
STREAMS = 80
NBYTES = 141 << 30


class Fleet:
    """What reports to one coordinator. `names` are those of its models, `domain` ends
    the names of its hosts."""

    def __init__(self, address: str, names: Sequence[str] = (), domain: str = "") -> None:
        self._address = address
        self._names = tuple(names) or tuple(f"model-{number}" for number in range(10))
        self._domain = domain
        self._random = random.Random(5)
        self.records: list[SourceRecord] = []
        self.pulls: dict[str, PullStatus] = {}
        self.registered = 0

    async def run(self, sources: int, pulls: int, *, pull_s: float = 30.0) -> None:
        """Register, beat and report until cancelled.

        Args:
            sources: How many sources.
            pulls: How many pulls at a time: one that has ended is followed by another.
            pull_s: How long each takes.
        """
        self.records = [self._record(number) for number in range(sources)]
        async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            clients = []
            for _ in range(-(-(sources + pulls) // STREAMS)):
                client = CoordinatorClient(self._address, timeout_s=30.0)
                stack.push_async_callback(client.close)
                clients.append(client)
            for number, record in enumerate(self.records):
                tasks.create_task(self._source(clients[number % len(clients)], record, number))
            for number in range(pulls):
                tasks.create_task(self._pulls(clients[number % len(clients)], number, pull_s))

    def _record(self, number: int) -> SourceRecord:
        record = record_of(number)
        place = replace(record.place, hostname=record.place.hostname + self._domain)
        return replace(record, model=ModelKey(self._names[number % len(self._names)]), place=place)

    async def _source(self, client: CoordinatorClient, record: SourceRecord, number: int) -> None:
        async def register() -> None:
            manifest = manifest_of(number % 10)
            await client.register(Registration(record, SECRET), manifest.documents)
            self.registered += 1

        def readers() -> int:
            return sum(record.endpoint in pull.sources for pull in self.pulls.values())

        await client.keep_alive(
            lambda: record, register, readers=readers, gb_per_s=lambda: 1.25 * min(1, readers())
        )

    async def _pulls(self, client: CoordinatorClient, number: int, pull_s: float) -> None:
        await asyncio.sleep(self._random.uniform(0, min(5.0, pull_s)))
        while True:
            with contextlib.suppress(MxError):  # a coordinator that is gone may come back
                await self._pull(client, number, pull_s)
            await asyncio.sleep(self._random.uniform(0, 1))

    async def _pull(self, client: CoordinatorClient, number: int, pull_s: float) -> None:
        model = number % len(self._names)
        near = [each for at, each in enumerate(self.records) if at % len(self._names) == model]
        chosen = self._random.sample(near, min(len(near), self._random.choice((1, 1, 2, 3))))
        pull_id, loop = str(uuid.uuid4()), asyncio.get_running_loop()
        began_s, took_s = loop.time(), pull_s * self._random.uniform(0.5, 1.5)
        async with client.reporting() as report:
            share = 0.0
            while share < 1:
                share = min(1.0, (loop.time() - began_s) / took_s)
                status = PullStatus(
                    pull_id=pull_id,
                    model=ModelKey(self._names[model]),
                    host=f"gpu-{number}{self._domain}",
                    pid=1000 + number,
                    phase=PullPhase.RUNNING if share < 1 else PullPhase.COMPLETE,
                    layers=LAYERS,
                    ready=(1 << int(LAYERS * share)) - 1,
                    nbytes=NBYTES,
                    done_bytes=int(NBYTES * share),
                    seconds=loop.time() - began_s,
                    sources=tuple(record.endpoint for record in chosen),
                    gb_per_s=NBYTES / took_s / 1e9,
                )
                self.pulls[pull_id] = status
                await report(status)
                await asyncio.sleep(1.0)
        del self.pulls[pull_id]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator")
    parser.add_argument("--sources", type=int, default=1000)
    parser.add_argument("--pulls", type=int, default=300)
    parser.add_argument("--pull-s", type=float, default=30.0)
    parser.add_argument("--name", action="append", default=[])
    parser.add_argument("--domain", default="")
    given = parser.parse_args()
    fleet = Fleet(given.coordinator, given.name, given.domain)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(fleet.run(given.sources, given.pulls, pull_s=given.pull_s))


if __name__ == "__main__":
    main()
