"""Clients that mean harm, against a real coordinator: others get on with their work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from mx import codec
from mx.core.types import ModelKey
from mx.core.versions import headers
from mx.errors import BindingError, CoordinatorError, PeerProtocolError
from mx.namekey import NameKey
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.v1 import common_pb2
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.clients import client_of
from tests.support.daemon import daemon, ended, mx, python
from tests.support.records import by_digest, make_documents, make_record, register_at, registration

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DOCUMENTS = make_documents("A")
SECRET = b"s" * 32
SERVICE = "/mx.wire.v1.Coordinator/"

_IMPATIENT = """
import sys
import mx.coordinator.progress, mx.coordinator.service, mx.wire.server
from mx.coordinator.daemon import CoordinatorOptions, run
mx.wire.server.FIRST_MESSAGE_S = float(sys.argv[1])
mx.coordinator.service._SILENT_S = mx.coordinator.progress.SILENT_S = 3.0
sys.exit(run(CoordinatorOptions(listen="127.0.0.1:0", lease_s=0.75)))
"""


async def register(client: CoordinatorClient, **options: Any) -> Any:
    record = make_record(DOCUMENTS, **options)
    await register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET)
    return record


def rss_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


# -- what is sent is counted, not what is announced -------------------------------------------


async def test_announced_documents_take_no_room() -> None:
    """Each of these messages announces large documents, and is followed by nothing."""
    documents = make_documents("huge")
    record = make_record(documents, name="huge")
    record = replace(record, ref=replace(record.ref, sizes=(128 << 20,) * 3))
    first = pb.RegisterRequest(
        source=codec.registration_to_wire(registration(record, SECRET))
    ).SerializeToString()
    assert len(first) < 700
    with daemon() as (_, address):
        channel: Any = dial(address)
        streams = [channel.stream_unary(SERVICE + "Register")() for _ in range(20)]
        try:
            for stream in streams:
                await stream.write(first)
            async with client_of(address, timeout_s=60.0) as client:
                for _ in range(20):  # round trips, in which the messages are received
                    assert await client.list_models() == []
                    await asyncio.sleep(0.05)
                await register(client)
                assert len((await client.resolve("llama")).sources) == 1
        finally:
            for stream in streams:
                stream.cancel()
            await channel.close(None)


# -- silence ----------------------------------------------------------------------------------


@contextmanager
def impatient_daemon(first_message_s: float) -> Iterator[str]:
    with ended(python(_IMPATIENT, str(first_message_s))) as process:
        assert process.stderr is not None
        yield process.stderr.readline().split()[-1]


METHODS = list(pb.DESCRIPTOR.services_by_name["Coordinator"].methods)


@pytest.mark.parametrize(
    "method",
    [METHODS[0], *(pytest.param(each, marks=pytest.mark.long) for each in METHODS[1:])],
    ids=lambda method: method.name,
)
async def test_a_call_in_which_nothing_is_sent_is_ended(method: Any) -> None:
    with impatient_daemon(1.0) as address:
        channel: Any = dial(address)
        calls = [
            channel.stream_stream(SERVICE + method.name)(metadata=headers()) for _ in range(50)
        ]
        try:
            async with asyncio.timeout(60):
                codes = {await call.code() for call in calls}
            assert codes == {grpc.StatusCode.INVALID_ARGUMENT}
            assert "nothing was sent within 1 s" in (await calls[0].details())
        finally:
            await channel.close(None)


async def test_streams_that_fall_silent_are_ended() -> None:
    with impatient_daemon(60.0) as address:
        channel: Any = dial(address)
        async with client_of(address, timeout_s=60.0) as client:
            record = await register(client)
            beat = pb.HeartbeatRequest(
                source_id=record.source_id, source_secret=SECRET, state=pb.SOURCE_STATE_SERVING
            )
            progress = pb.ProgressRequest(
                pull=pb.PullProgress(
                    pull_id=str(uuid.uuid4()),
                    model=common_pb2.ModelKey(name="llama"),
                    phase=pb.PullProgress.PHASE_RUNNING,
                )
            )
            try:
                for name, message in (("Heartbeat", beat), ("Progress", progress)):
                    call = channel.stream_stream(SERVICE + name)(metadata=headers())
                    await call.write(message.SerializeToString())
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        async with asyncio.timeout(60):
                            while isinstance(await call.read(), bytes):
                                pass
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert " for 3 s" in await call.details()
            finally:
                await channel.close(None)


# -- watchers that do not read ----------------------------------------------------------------


async def test_watchers_that_do_not_read_cost_little() -> None:
    """The snapshot has 6 MB; a hundred copies of it would be 600."""
    with daemon(lease_s=600.0) as (process, address):
        async with client_of(address, timeout_s=60.0) as client:
            for _ in range(400):
                record = make_record(DOCUMENTS)
                place = replace(record.place, driver="x" * 15_000)
                await register_at(
                    client, replace(record, place=place), by_digest(DOCUMENTS), source_secret=SECRET
                )
            before = rss_bytes(process.pid)
            channel: Any = dial(address)
            watch = channel.unary_stream(SERVICE + "Watch")
            for batches in (False, True):
                request = pb.WatchRequest(batches=batches).SerializeToString()
                calls = [watch(request, metadata=headers()) for _ in range(50)]
                for call in calls:
                    await call.initial_metadata()
            for _ in range(50):  # each a round trip, so that they write all that they can
                await client.resolve("llama")
            grown = rss_bytes(process.pid) - before
            await channel.close(None)
    assert grown < 100 << 20, f"{grown >> 20} MiB"


# -- entries that break lists -----------------------------------------------------------------


async def test_numbers_that_cannot_be_added_up_are_refused_on_entry() -> None:
    with daemon(lease_s=60.0) as (_, address):
        async with client_of(address, timeout_s=60.0) as client:
            await register(client)
            record = make_record(DOCUMENTS, name="evil")
            region = replace(record.table.regions[0], base=0, nbytes=(1 << 64) - 1)
            regions = (region, replace(region, index=1, layers=(4, 8)))
            evil = replace(record, table=replace(record.table, regions=regions))
            with pytest.raises(PeerProtocolError, match="more than any memory"):
                await register_at(client, evil, by_digest(DOCUMENTS), source_secret=SECRET)
            many = tuple(
                replace(region, index=i, nbytes=1, layers=(i, i + 1))
                for i in range(codec.MAX_REGIONS + 1)
            )
            with pytest.raises(PeerProtocolError, match="regions"):
                await register_at(
                    client,
                    replace(record, table=replace(record.table, regions=many)),
                    by_digest(DOCUMENTS),
                    source_secret=SECRET,
                )
        everything_lists(address)


async def test_a_revision_that_would_outgrow_its_limit_is_refused() -> None:
    others = make_documents("B")
    with daemon(lease_s=60.0) as (_, address):
        async with client_of(address, timeout_s=60.0) as client:
            revision = "r" * 256
            key = NameKey(b"k" * 32)
            await register_at(
                client,
                make_record(DOCUMENTS, revision=revision),
                by_digest(DOCUMENTS),
                source_secret=SECRET,
                name_key=key,
            )
            with pytest.raises(BindingError, match="shorter `revision`") as refused:
                await register_at(
                    client,
                    make_record(others, revision=revision),
                    by_digest(others),
                    source_secret=SECRET,
                    name_key=key,
                    replaces=revision,
                )
            assert "258" in refused.value.message
            assert [m.model.revision for m in await client.list_models()] == [revision]
        everything_lists(address)


async def test_errors_arrive_however_long_and_strange_the_names_are() -> None:
    with daemon(lease_s=60.0) as (_, address):
        async with client_of(address, timeout_s=60.0) as client:
            name = "\U0001f999" * 256
            for number in range(6):
                await register(client, name=name, revision=f"{number}" + "\U0001f999" * 255)
            with pytest.raises(CoordinatorError, match="no "):
                await client.resolve(name)


def everything_lists(address: str) -> None:
    """The listing commands work and print no error."""
    for verb in (["models"], ["sources"], ["top", "--once"]):
        ran = mx(*verb, "--coordinator", address)
        assert ran.returncode == 0 and "llama" in ran.stdout + " no pulls", ran
        assert ran.stderr == "", ran


class Liar:
    """A coordinator that lists entries which no client can read, between good ones."""

    def __init__(self) -> None:
        good = make_record(DOCUMENTS)
        bad = replace(good, model=ModelKey("b" * 300))
        self.sources = [codec.source_to_wire(record) for record in (good, bad, good)]
        self.models = [
            pb.Model(model=source.model, manifest=source.manifest) for source in self.sources
        ]
        self.pulls = [
            pb.PullProgress(
                pull_id=str(uuid.uuid4()),
                model=common_pb2.ModelKey(name="llama"),
                phase=pb.PullProgress.PHASE_RUNNING,
                nbytes=nbytes,
            )
            for nbytes in (10, (1 << 64) - 1)
        ]

    async def ListModels(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(headers())
        yield pb.ListModelsResponse(models=self.models).SerializeToString()

    async def ListSources(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(headers())
        statuses = [pb.SourceStatus(source=source) for source in self.sources]
        statuses.append(pb.SourceStatus(source=self.sources[0], gb_per_s=float("nan")))
        yield pb.ListSourcesResponse(sources=statuses, pulls=self.pulls).SerializeToString()

    async def ListBundles(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(headers())
        good: dict[str, Any] = {
            "name": "llama",
            "revision": "main",
            "variant": "tp=*/2",
            "ranks": 2,
        }
        wrong: list[dict[str, Any]] = [
            {"name": "b" * 300},
            {"revision": "a]"},
            {"variant": "tp=0/2"},
            {"variant": "tp=*/2,pp=*/5000"},
            {"variant": "tp=*/2,x=\x1b"},
            {"ranks": 3},
            {"missing_count": 3},
            {"missing": ["tp=0/2"]},
            {"missing": ["tp=0/4"], "missing_count": 1},
            {"missing": ["tp=0/2" + " " * 1000], "missing_count": 1},
        ]
        bundles = [pb.Bundle(**(good | each)) for each in ({}, *wrong)]
        yield pb.ListBundlesResponse(bundles=bundles).SerializeToString()

    async def Watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.send_initial_metadata(headers())
        up = pb.WatchEvent.KIND_SOURCE_UP
        events = [pb.WatchEvent(kind=up, source=source) for source in self.sources]
        events.append(pb.WatchEvent(kind=99))  # type: ignore[arg-type]
        pull = pb.WatchEvent.KIND_PULL
        events += [pb.WatchEvent(kind=pull, pull=each) for each in self.pulls]
        gone = pb.WatchEvent.KIND_PULL_GONE
        events.append(pb.WatchEvent(kind=gone, pull=pb.PullProgress(pull_id="\x1b[2J")))
        rank = common_pb2.ModelKey(name="llama", revision="main", variant="tp=0/2")
        events.append(pb.WatchEvent(kind=pb.WatchEvent.KIND_NAMED, named=rank))
        yield pb.WatchEvent(batch=events).SerializeToString()
        yield pb.WatchEvent(kind=pb.WatchEvent.KIND_SNAPSHOT_END).SerializeToString()

    async def Resolve(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata(headers())
        source = self.sources[0]
        return pb.ResolveResponse(
            model=source.model, manifest=source.manifest, sources=self.sources
        ).SerializeToString()


@asynccontextmanager
async def liar() -> AsyncIterator[str]:
    lies, server = Liar(), grpc.aio.server()
    handlers: Any = {
        name: grpc.unary_stream_rpc_method_handler(getattr(lies, name))
        for name in ("ListBundles", "ListModels", "ListSources", "Watch")
    }
    handlers["Resolve"] = grpc.unary_unary_rpc_method_handler(lies.Resolve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("mx.wire.v1.Coordinator", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_bad_entry_is_skipped_by_every_client() -> None:
    async with liar() as address, client_of(address, timeout_s=60.0) as client:
        assert len(await client.list_models()) == 2
        assert len(await client.list_sources()) == 2
        found_pulls, found_sources = await client.overview()
        assert (len(found_pulls), len(found_sources)) == (1, 2)
        assert [str(each) for each in await client.list_bundles()] == ["llama[tp=*/2]"]
        found = await client.resolve("llama")
        assert len(found.sources) == 2
        assert found.source_count == 3  # of a coordinator that does not say how many there are
        watch = client.watch()
        kinds = [(await anext(watch)).kind.name for _ in range(4)]
        assert kinds == ["UP", "UP", "PULL", "SNAPSHOT_END"]
        await watch.aclose()


@pytest.mark.parametrize(
    ("verb", "lines"), [(["models"], 7), (["sources"], 2), (["top", "--once"], 3)]
)
async def test_a_bad_entry_is_reported_in_one_line(verb: list[str], lines: int) -> None:
    async with liar() as address:
        ran = await asyncio.to_thread(mx, *verb, "--coordinator", address)
    assert ran.returncode == 0 and "llama" in ran.stdout, ran
    said = ran.stderr.splitlines()
    assert len(said) == lines and all("skipped a " in line for line in said), ran.stderr
