"""The daemon as a process: leases and kills, restarts, signals, ports, garbage, TLS."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from mx.errors import (
    BindingError,
    ConfigError,
    CoordinatorError,
    LocalError,
    MxError,
    NotAllowedError,
    UnknownSourceError,
)
from mx.namekey import NameKey
from mx.transport import TlsFiles
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind
from mx.wire.server import listen
from tests.support.certificates import Authority
from tests.support.clients import client_of
from tests.support.daemon import daemon, ended, python, terminate
from tests.support.owners import plain
from tests.support.records import by_digest, make_documents, make_record, register_at

pytestmark = pytest.mark.integration

DOCUMENTS = make_documents("A")
SECRET = b"s" * 32

_REGISTRANT = """
import asyncio, sys
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind
from tests.support.records import by_digest, make_documents, make_record, register_at

async def main():
    documents = make_documents("A")
    record = make_record(documents, source_id=sys.argv[2])
    client = CoordinatorClient(sys.argv[1])
    await client.keep_alive(
        lambda: record,
        lambda: register_at(client, record, by_digest(documents), source_secret=b"r" * 16),
        on_state=lambda registered, why: print(registered, file=sys.stderr, flush=True),
    )

asyncio.run(main())
"""
SOURCE_ID = "00000000-0000-4000-8000-000000000001"


async def until_gone(client: CoordinatorClient) -> str:
    """Why the one source that is listed went."""
    async with aclosing(client.watch("llama")) as updates:
        async for update in updates:
            if update.kind is WatchKind.GONE:
                return update.reason
    raise AssertionError("the watch ended")


async def test_a_killed_registrants_lease_ends() -> None:
    with (
        daemon(lease_s=1.0) as (_, address),
        ended(python(_REGISTRANT, address, SOURCE_ID)) as registrant,
    ):
        assert registrant.stderr is not None
        assert registrant.stderr.readline() == "True\n"
        async with client_of(address) as client:
            found = await client.resolve("llama")
            assert [source.source_id for source in found.sources] == [SOURCE_ID]
            registrant.kill()
            assert await asyncio.wait_for(until_gone(client), 60) == "lease expired"
            assert (await client.resolve("llama")).sources == []


async def test_sources_come_back_to_a_coordinator_that_was_killed() -> None:
    states: list[bool] = []
    reasons: list[str] = []
    changed = asyncio.Event()

    def on_state(registered: bool, why: str) -> None:
        states.append(registered)
        reasons.append(why)
        changed.set()

    async def next_state() -> bool:
        async with asyncio.timeout(60):
            await changed.wait()
        changed.clear()
        return states[-1]

    record = make_record(DOCUMENTS)
    with daemon(lease_s=3.0) as (process, address):
        async with client_of(address) as client:
            first = await register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET)
            alive = asyncio.create_task(
                client.keep_alive(
                    lambda: record,
                    lambda: register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET),
                    on_state=on_state,
                )
            )
            try:
                assert await next_state() is True
                process.kill()
                process.wait()
                assert await next_state() is False
                with pytest.raises(CoordinatorError, match="no coordinator answers"):
                    await client.resolve("llama")
                with daemon(address, lease_s=3.0) as (_, again):
                    assert again == address
                    assert await next_state() is True
                    found = await client.resolve("llama")
                    assert found.sources == [record]
                    second = await register_at(
                        client, record, by_digest(DOCUMENTS), source_secret=SECRET
                    )
                    assert second.epoch != first.epoch
            finally:
                alive.cancel()
                await asyncio.gather(alive, return_exceptions=True)
    assert states == [True, False, True]
    assert all(address in reason and "coordinator" in reason for reason in reasons), reasons


async def test_a_stopped_coordinator_is_an_error_within_the_deadline() -> None:
    with daemon() as (process, address):
        client = CoordinatorClient(address, timeout_s=5.0)
        try:
            await client.list_models()
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(CoordinatorError):
                await client.resolve("llama")
            # An open stream notices by its pings.
            async with asyncio.timeout(60):
                with pytest.raises(CoordinatorError):
                    await until_gone(client)
            process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(60):
                while True:
                    try:
                        await client.list_models()
                        break
                    except CoordinatorError:
                        await asyncio.sleep(0.1)
        finally:
            await client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_end_it_with_0_though_a_watch_is_open(number: signal.Signals) -> None:
    with daemon() as (process, address):
        async with client_of(address) as client, aclosing(client.watch()) as updates:
            assert (await anext(updates)).kind is WatchKind.SNAPSHOT_END
            process.send_signal(number)
            with pytest.raises(CoordinatorError):
                await anext(updates)
        assert process.wait(60) == 0
        assert process.stderr is not None and process.stderr.read() == ""


def test_it_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, mx.coordinator.daemon; sys.exit(bool({'torch', 'numpy'} & {*sys.modules}))"
    with ended(python(code)) as process:
        assert process.wait(30) == 0


async def test_a_port_in_use_is_said() -> None:
    with daemon() as (_, address):
        port = address.rpartition(":")[2]
        with pytest.raises(LocalError, match=rf"port {port}.*in use"):
            await listen(address, [])


async def test_remote_addresses_want_tls() -> None:
    for address in ("0.0.0.0:0", "[::]:0", "somewhere.example:0"):
        with pytest.raises(ConfigError, match="`insecure`"):
            await listen(address, [])
        with pytest.raises(ConfigError, match="`insecure`"):
            dial(address)
    listening = await listen("0.0.0.0:0", [], insecure=True)
    await listening.stop()


GARBAGE = [
    b"",
    b"\x00" * 4096,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    bytes.fromhex("16030100c8010000c40303") + b"\x41" * 190,  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512,  # a preface, then no frames
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000") * 2000,
    b"SSH-2.0-OpenSSH_9.6\r\n",
]


async def test_garbage_on_the_port_does_no_harm() -> None:
    with daemon() as (process, address):
        host, _, port = address.rpartition(":")
        held = []
        try:
            for data in GARBAGE:
                connection = socket.create_connection((host, int(port)), timeout=5)
                held.append(connection)  # held open while the next ones come
                connection.sendall(data)
            for connection in held[:3]:
                connection.close()
            async with client_of(address) as client:
                record = make_record(DOCUMENTS)
                await register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET)
                assert (await client.resolve("llama")).sources == [record]
        finally:
            for connection in held:
                connection.close()
        assert terminate(process) == 0


class _Foreign(asyncio.Protocol):
    """One end of a connection, that sends an answer at most."""

    def __init__(self, answer: bytes | None, there: set[asyncio.Transport]) -> None:
        self._answer, self._there = answer, there

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._there.add(transport)
        if self._answer is not None:
            transport.write(self._answer)


@asynccontextmanager
async def foreign_server(answer: bytes | None) -> AsyncIterator[str]:
    """A server that is not gRPC: sends `answer` to every client, or nothing at all."""
    there: set[asyncio.Transport] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Foreign(answer, there), "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for _ in range(5):  # what was accepted last is there then
        await asyncio.sleep(0)
    for transport in there:
        transport.abort()
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00" * 100, b"220 mail\r\n", None],
)
async def test_a_foreign_server_is_an_error(answer: bytes | None) -> None:
    async with foreign_server(answer) as address, client_of(address) as client:
        with pytest.raises(CoordinatorError) as caught:
            await client.resolve("llama")
    assert address in str(caught.value) and caught.value.hint


async def is_not_let_in(address: str, tls: TlsFiles) -> None:
    """Check that the daemon refuses a client with these files, without our client's own checks."""
    key, certificate, authority = (
        Path(path).read_bytes() for path in (tls.key, tls.certificate, tls.authority)
    )
    shown = grpc.ssl_channel_credentials(authority, key, certificate)
    async with grpc.aio.secure_channel(address, shown) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/mx.wire.v1.Coordinator/Resolve", bytes, bytes)(
                b"", timeout=20
            )
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server, peer = ours.certificate("server"), ours.certificate("peer")
    stranger = theirs.certificate("stranger")
    files = (server.certificate, server.key, server.authority)
    with daemon(tls=files) as (process, address):
        async with client_of(address, tls=peer) as client:
            record = make_record(DOCUMENTS)
            await register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET)
            assert (await client.resolve("llama")).sources == [record]
        # Another authority's certificate, with and without knowing ours; and no TLS at all.
        forged = TlsFiles(stranger.certificate, stranger.key, peer.authority)
        with pytest.raises(NotAllowedError, match="not signed by an authority"):
            CoordinatorClient(address, tls=forged)
        await is_not_let_in(address, forged)
        for tls in (stranger, None):
            async with client_of(address, tls=tls) as client:
                with pytest.raises(MxError) as caught:
                    await client.resolve("llama")
                assert isinstance(caught.value, CoordinatorError)
        assert terminate(process) == 0
    # A client that wants TLS does not connect to a daemon without.
    with daemon() as (_, address):
        async with client_of(address, tls=peer) as client:
            with pytest.raises(NotAllowedError, match="secure") as refused:
                await client.resolve("llama")
            assert "`tls_ca`" in refused.value.hint


async def test_identities_and_source_ids_are_not_taken_over() -> None:
    with daemon() as (_, address):
        async with client_of(address) as owner, client_of(address) as thief:
            record = make_record(DOCUMENTS)
            key, other_key = NameKey(b"o" * 32), NameKey(b"t" * 32)
            await register_at(
                owner, record, by_digest(DOCUMENTS), source_secret=SECRET, name_key=key
            )
            others = make_documents("B")
            with pytest.raises(BindingError, match="is bound to"):
                await register_at(
                    thief, make_record(others), by_digest(others), source_secret=b"t" * 32
                )
            for name_key, kind in ((None, NotAllowedError), (other_key, BindingError)):
                with pytest.raises(kind, match="name key"):
                    await register_at(
                        thief,
                        make_record(others),
                        by_digest(others),
                        source_secret=b"t" * 32,
                        name_key=name_key,
                        replaces="main",
                    )
            with pytest.raises(NotAllowedError, match="belongs to another source"):
                await register_at(thief, record, by_digest(DOCUMENTS), source_secret=b"t" * 32)
            with pytest.raises(UnknownSourceError):
                await thief.deregister(record.source_id)
            pinned = f"llama@{record.ref.identity.hex()[:12]}"
            (found,) = (await thief.resolve(pinned)).sources
            assert found.by_owner and key.vouched(found) and not other_key.vouched(found)
            assert plain(replace(found, statement=b"")) == record
            update = await register_at(
                owner,
                make_record(others),
                by_digest(others),
                source_secret=SECRET,
                name_key=key,
                replaces="main",
            )
            assert update.model.revision == "main.2"
            assert len(await owner.list_models()) == 2
