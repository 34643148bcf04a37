"""Peers that take what a source gives and use none of it, between real processes: the source stays
within its descriptors, and honest pulls complete meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mx import plugins
from mx.core.budget import REQUEST_BYTES
from mx.core.grants import MOST_PER_CONNECTION
from mx.core.layout import TensorSpec, plan_layout
from mx.core.versions import headers
from mx.errors import EXIT_OK, PeerBusyError
from mx.fetching.connector import Connector
from mx.fetching.options import PullOptions
from mx.fetching.paths import plan_paths, target_place
from mx.wire.locate import Locator
from mx.wire.v1 import peer_pb2
from tests.integration.lease_hog import Hog, answer
from tests.support.commands import Command, Run, environment
from tests.support.daemon import ROOT
from tests.support.outcomes import until

pytestmark = [pytest.mark.integration, pytest.mark.long]

DESCRIPTORS = 256
OPENS = 900
START_S = 120.0


class LimitedCommand(Command):
    """One of our commands, with few descriptors."""

    def command(self, entry: str) -> list[str]:
        return ["sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh", *super().command(entry)]


@pytest.fixture
def serve(checkpoint: Path) -> Iterator[Callable[..., tuple[str, int]]]:
    """Starts a source with few descriptors; gives its endpoint and its pid."""
    started: list[Command] = []

    def start(coordinator: str, *more: str) -> tuple[str, int]:
        at = ("--coordinator", coordinator, "--json")
        started.append(LimitedCommand("serve", str(checkpoint), "--model", "m", *at, *more))
        return str(started[-1].json()["endpoint"]), started[-1].process.pid

    yield start
    for command in started:
        command.end()


@pytest.fixture
def hog() -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a hog and gives what it was answered; it goes on until the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(endpoint: str, opens: int, connections: int = 1, streams: int = 0) -> dict[str, Any]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.lease_hog", endpoint, "m",
                 *map(str, (opens, connections, streams))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env=environment(),
            )
        )  # fmt: skip
        assert started[-1].stdout is not None
        found = json.loads(started[-1].stdout.readline())
        assert isinstance(found, dict)
        return found

    yield start
    for process in started:
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        process.wait(30)
        process.stdin.close()
        process.stdout.close()


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.timeout(300)
def test_opens_on_one_connection_do_not_exhaust_the_descriptors(
    run: Run, coordinator: str, serve: Callable[..., tuple[str, int]], hog: Callable[..., Any]
) -> None:
    endpoint, pid = serve(coordinator)
    before = descriptors_of(pid)
    answers = hog(endpoint, OPENS)["answers"]
    assert answers["granted"] == MOST_PER_CONNECTION
    assert answers["busy"] == OPENS - MOST_PER_CONNECTION
    # One connection's, and nothing for its grants.
    assert descriptors_of(pid) <= before + 8
    for transport in (["--transport", "tcp"], ["--transport", "shm", "--no-attach"], []):
        pulled = run("pull", "m", "--coordinator", coordinator, "--json", *transport)
        assert pulled.wait(START_S) == EXIT_OK, pulled.err
    until(lambda: descriptors_of(pid) <= before + 8, "few descriptors")


@pytest.mark.timeout(300)
def test_idle_grants_give_their_places_to_honest_pulls(
    run: Run, coordinator: str, serve: Callable[..., tuple[str, int]], hog: Callable[..., Any]
) -> None:
    """The hog claims gigabytes with every renewal, under as many names as it has grants."""
    endpoint, _ = serve(coordinator, "--max-readers", "2")
    answers = hog(endpoint, 4, 12)["answers"]
    assert answers["granted"] >= 8 and answers["busy"]  # two connections are two readers
    for transport in ("tcp", "shm"):
        at = ("--coordinator", coordinator, "--json", "--no-attach", "--wait", "90")
        pulled = run("pull", "m", *at, "--transport", transport)
        assert pulled.wait(START_S) == EXIT_OK, pulled.err


@pytest.mark.timeout(300)
def test_one_address_does_not_hold_all_grants(
    run: Run, coordinator: str, serve: Callable[..., tuple[str, int]], hog: Callable[..., Any]
) -> None:
    """More connections than there are grants for one address: those that move nothing yield."""
    endpoint, _ = serve(coordinator)
    most = DESCRIPTORS // 8
    answers = hog(endpoint, MOST_PER_CONNECTION, 6)["answers"]
    assert most <= answers["granted"] < 6 * MOST_PER_CONNECTION
    pulled = run("pull", "m", "--coordinator", coordinator, "--json", "--no-attach", "--wait", "90")
    assert pulled.wait(START_S) == EXIT_OK, pulled.err


@pytest.mark.timeout(300)
def test_data_connections_do_not_exhaust_the_descriptors(
    run: Run, coordinator: str, serve: Callable[..., tuple[str, int]], hog: Callable[..., Any]
) -> None:
    endpoint, pid = serve(coordinator)
    before = descriptors_of(pid)
    found = hog(endpoint, MOST_PER_CONNECTION, 1, 32)
    assert found["sockets"] > DESCRIPTORS
    most = before + DESCRIPTORS // 4
    until(lambda: descriptors_of(pid) <= most + 8, "few descriptors")
    pulled = run("pull", "m", "--coordinator", coordinator, "--json", "--transport", "tcp")
    assert pulled.wait(START_S) == EXIT_OK, pulled.err


@pytest.mark.timeout(300)
def test_the_name_of_an_admitted_pull_admits_no_other(
    coordinator: str, serve: Callable[..., tuple[str, int]]
) -> None:
    endpoint, _ = serve(coordinator, "--max-readers", "1")
    hogs = [Hog(endpoint, "m") for _ in range(2)]
    try:
        name = "00000000-0000-4000-8000-000000000001"
        stubs = [each.stub() for each in hogs]
        for stub in stubs:
            stub.Describe(
                peer_pb2.DescribeRequest(), timeout=30, metadata=headers()
            )  # connected, by now
        calls = [each.open(stub, reader_id=name) for each, stub in zip(hogs, stubs, strict=True)]
        assert sorted(map(answer, calls)) == ["busy", "granted"]
    finally:
        for each in hogs:
            each.end()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fields",
    [
        {"reader_id": "x" * 60_000},
        {"reader_id": "not-a-uuid"},
        {"source_id": "x" * 60_000},
        {"identity": b"short"},
        {"place": {"driver": "x" * 60_000}},
        {"reader_id": "x" * (3 << 20)},
    ],
    ids=["reader_id-60kB", "reader_id", "source_id", "identity", "place", "reader_id-3MiB"],
)
def test_a_first_message_that_no_pull_sends_is_refused(
    coordinator: str, serve: Callable[..., tuple[str, int]], fields: dict[str, Any]
) -> None:
    endpoint, _ = serve(coordinator)
    hog = Hog(endpoint, "m")
    try:
        code = grpc.StatusCode.INVALID_ARGUMENT
        if len(fields.get("reader_id", "")) > REQUEST_BYTES:  # which gRPC itself refuses
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer(hog.open(hog.stub(), **fields)) == code.name
    finally:
        hog.end()


@pytest.mark.timeout(300)
def test_a_way_that_was_opened_early_is_opened_again_when_its_place_was_taken(
    coordinator: str, serve: Callable[..., tuple[str, int]]
) -> None:
    """As by a pull that first verifies what an earlier one has left."""
    endpoint, _ = serve(coordinator, "--max-readers", "1")
    options = PullOptions("m", coordinator=coordinator, transport="tcp")
    place, transports = target_place(options), plugins.transports()

    async def main() -> None:
        locator = Locator(options)
        connector = Connector(options, lambda: place, transports, lambda: None)
        hog = Hog(endpoint, "m")
        try:
            (path,) = plan_paths(
                options, place, transports, (await locator.locate()).sources
            ).chosen
            await connector.begin([path])
            first = await connector._begun[path]
            stub = hog.stub()
            async with asyncio.timeout(120):
                while (call := hog.open(stub)) and await asyncio.to_thread(answer, call) == "busy":
                    await asyncio.sleep(0.2)
                while first[0].lease.check() is None:
                    await asyncio.sleep(0.05)
            assert isinstance(first[0].lease.check(), PeerBusyError)
            hog.end()
            async with asyncio.timeout(120):
                layout = plan_layout([TensorSpec("w", "U8", (1,))])
                while True:  # until the source has seen that the hog is gone
                    with contextlib.suppress(PeerBusyError):
                        opened = await connector.open(path, layout)
                        break
                    await asyncio.sleep(0.2)
            assert opened is not first[0] and opened.lease.check() is None
        finally:
            hog.end()
            await connector.close()
            await locator.close()

    asyncio.run(main())
