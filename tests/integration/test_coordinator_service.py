"""The service inside one event loop: big tables, malformed requests, watches, health."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mx import codec
from mx.coordinator.daemon import Coordinator
from mx.coordinator.state import CoordinatorState, open_state
from mx.coordinator.watchers import INTERVAL_S
from mx.core.budget import Limits
from mx.core.digest import document_digest
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey, SourceState, TableRow
from mx.core.versions import headers
from mx.errors import (
    CapacityError,
    ConfigError,
    CoordinatorError,
    MxError,
    NotAllowedError,
    PeerProtocolError,
    StaleGenerationError,
    UnknownModelError,
    UnknownSourceError,
)
from mx.namekey import NameKey
from mx.wire import documents as wire_documents
from mx.wire.client import CoordinatorClient
from mx.wire.listing import WatchKind, WatchUpdate
from mx.wire.rows import encode_rows, with_rows
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.records import (
    by_digest,
    make_documents,
    make_record,
    register_at,
    registration,
    scattered_rows,
)
from tests.support.stores import new_store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("each_store")]

DOCUMENTS = make_documents("A")
SECRET = b"s" * 32


@asynccontextmanager
async def coordinator(
    state: CoordinatorState | None = None, *, lease_s: float = 5.0
) -> AsyncIterator[CoordinatorClient]:
    """A client of a coordinator that runs beside it."""
    running = Coordinator(state=state or CoordinatorState(new_store(), lease_s=lease_s))
    client = CoordinatorClient(await running.start("127.0.0.1:0"))
    try:
        yield client
    finally:
        await client.close()
        await running.stop()


async def register(client: CoordinatorClient, **options: Any) -> Any:
    record = make_record(DOCUMENTS, **options)
    await register_at(client, record, by_digest(DOCUMENTS), source_secret=SECRET)
    return record


async def test_50_000_tensors_pass_the_default_message_limit() -> None:
    documents = make_documents("big", nbytes=5 << 20)
    rows = scattered_rows(50_000)
    scattered = make_record(documents, rows=rows, held=((0, 6250),))
    compact = make_record(documents)
    async with coordinator() as client:
        every = by_digest([*documents, encode_rows(rows)])
        for record in (scattered, compact):
            await register_at(client, record, every, source_secret=SECRET)
        found = await client.resolve("llama")
        assert found.sources == [scattered, compact]
        # The coordinator keeps the rows while their source is listed.
        table = found.sources[0].table
        (document,) = (await client.fetch(table.documents)).values()
        assert with_rows(table, document).rows == rows
        refs = found.ref.documents
        both = await asyncio.gather(client.fetch(refs), client.fetch(refs))
        assert all(got == by_digest(documents) for got in both)


async def test_rows_go_with_their_source_and_the_manifest_with_the_last() -> None:
    rows = scattered_rows(4)
    first = make_record(DOCUMENTS, rows=rows, held=((0, 1),))
    async with coordinator(CoordinatorState(new_store(), grace_s=0.0)) as client:
        every = by_digest([*DOCUMENTS, encode_rows(rows)])
        await register_at(client, first, every, source_secret=SECRET)
        await register(client)
        assert await client.fetch(first.table.documents)
        await client.deregister(first.source_id)
        await asyncio.sleep(0)
        await client.list_sources()  # lets time pass
        with pytest.raises(UnknownModelError):
            await client.fetch(first.table.documents)
        assert await client.fetch(first.ref.documents) == by_digest(DOCUMENTS)


async def test_only_what_is_missing_is_uploaded() -> None:
    async with coordinator() as client:
        await register(client)
        record = make_record(DOCUMENTS)
        await register_at(client, record, {}, source_secret=SECRET)
        assert len((await client.resolve("llama")).sources) == 2


async def test_models_and_sources_are_listed() -> None:
    async with coordinator() as client:
        assert await client.list_models() == [] and await client.list_sources() == []
        first = await register(client)
        second = await register(client, name="other", variant="tp0of2")
        models = await client.list_models()
        assert [(m.model, m.ref, m.nbytes, m.layers, m.sources) for m in models] == [
            (record.model, record.ref, 1 << 20, 4, 1) for record in (first, second)
        ]
        (status,) = await client.list_sources("other")
        # Until its first heartbeat it has three leases of time.
        assert status.record == second and 5 < status.lease_left_s <= 15


async def test_more_sources_than_one_message_holds() -> None:
    async with coordinator(lease_s=60.0) as client:
        for _ in range(200):
            record = make_record(DOCUMENTS)
            place = replace(record.place, driver="x" * 16_000)
            await register_at(
                client, replace(record, place=place), by_digest(DOCUMENTS), source_secret=SECRET
            )
        assert len(await client.list_sources()) == 200
        assert 0 < len((await client.resolve("llama")).sources) < 200


async def raw(client: CoordinatorClient, method: str, *messages: bytes) -> grpc.aio.AioRpcError:
    """The refusal that these bytes meet."""
    streaming = method in ("Register", "Heartbeat")
    channel: Any = client.link.channel

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            yield message

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if method == "Heartbeat":
            async for _ in channel.stream_stream(f"/mx.wire.v1.Coordinator/{method}")(
                requests(), metadata=headers()
            ):
                pass
        elif streaming:
            await channel.stream_unary(f"/mx.wire.v1.Coordinator/{method}")(
                requests(), metadata=headers()
            )
        elif method in ("Watch", "ListModels", "ListSources"):
            async for _ in channel.unary_stream(f"/mx.wire.v1.Coordinator/{method}")(
                messages[0], metadata=headers()
            ):
                pass
        else:
            await channel.unary_unary(f"/mx.wire.v1.Coordinator/{method}")(
                messages[0], metadata=headers()
            )
    return caught.value


METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods]


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_bytes_are_an_invalid_argument(method: str) -> None:
    async with coordinator() as client:
        error = await raw(client, method, b"\xff\xff\xff\xff")
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"malformed {method}Request" in (error.details() or "")
        assert await client.list_models() == []


def source_message(**options: Any) -> bytes:
    record = make_record(DOCUMENTS, **options)
    source = codec.registration_to_wire(registration(record, SECRET))
    return pb.RegisterRequest(source=source).SerializeToString()


async def test_nonsense_registrations_are_refused_and_leave_nothing() -> None:
    state = CoordinatorState(new_store())
    pages = [
        pb.RegisterRequest(page=page).SerializeToString()
        for digest, data in by_digest(DOCUMENTS).items()
        for page in wire_documents.pages(digest, data)
    ]
    wrong = pb.RegisterRequest.FromString(pages[0])
    wrong.page.data = b"x" * len(wrong.page.data)
    first, second = scattered_rows(2)
    beyond = (first, second._replace(region_offset=1 << 44))
    scattered, outside = (
        source_message(rows=rows, held=((0, 1),)) for rows in ((first, second), beyond)
    )

    def rows_of(*rows: TableRow) -> bytes:
        data = encode_rows(rows)
        (page,) = wire_documents.pages(document_digest(data), data)
        return pb.RegisterRequest(page=page).SerializeToString()

    attempts: list[list[bytes]] = [
        [],
        pages,
        [source_message()],
        [source_message(), *pages[:2]],
        [source_message(), wrong.SerializeToString(), *pages[1:]],
        [source_message(), *pages, pages[0]],
        [source_message(), *pages, source_message()],
        [source_message(name="a@b"), *pages],
        [scattered, *pages],
        [scattered, *pages, rows_of(first)],
        [outside, *pages, rows_of(*beyond)],
    ]
    async with coordinator(state) as client:
        for attempt in attempts:
            error = await raw(client, "Register", *attempt)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error.details()
        assert await client.list_sources() == [] and await client.list_models() == []
        assert await state.missing([document_digest(d) for d in DOCUMENTS])
        good = [scattered, *pages, rows_of(first, second)]
        channel: Any = client.link.channel

        async def requests() -> AsyncIterator[bytes]:
            for message in good:
                yield message

        await channel.stream_unary("/mx.wire.v1.Coordinator/Register")(
            requests(), metadata=headers()
        )
        assert len(await client.list_sources()) == 1


async def test_limits_are_said() -> None:
    limits = Limits(models=1, sources=3, documents_nbytes=4 * 1000)
    small = CoordinatorState(new_store(), limits=limits)
    async with coordinator(small) as client:
        await register(client)
        with pytest.raises(CoordinatorError, match="1 models"):
            await register(client, name="other")
        await register(client)
        with pytest.raises(CoordinatorError, match="2 sources"):
            await register(client)
        big = make_documents("A", nbytes=600)
        with pytest.raises(CoordinatorError, match="documents of"):
            await register_at(
                client, make_record(big, name="z"), by_digest(big), source_secret=SECRET
            )
        error = await raw(client, "Register", source_message(name="other"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_documents_go_with_the_last_source() -> None:
    state = CoordinatorState(new_store(), grace_s=0.0)
    async with coordinator(state, lease_s=5.0) as client:
        record = make_record(DOCUMENTS)
        await register_at(
            client, record, by_digest(DOCUMENTS), source_secret=SECRET, name_key=NameKey(b"k" * 32)
        )
        refs = record.ref.documents
        assert await client.fetch(refs) == by_digest(DOCUMENTS)
        await client.deregister(record.source_id)
        await state.tick()
        with pytest.raises(UnknownModelError, match="not held"):
            await client.fetch(refs)
        with pytest.raises(UnknownModelError):
            await client.resolve("llama")


async def test_advertise() -> None:
    async with coordinator() as client:
        record = await register(client, held=())
        await client.advertise(record.source_id, 1, [(0, 2), (3, 4)])
        (source,) = (await client.resolve("llama")).sources
        assert source.table.held == ((0, 2), (3, 4))
        with pytest.raises(StaleGenerationError):
            await client.advertise(record.source_id, 0, [(0, 4)])
        with pytest.raises(PeerProtocolError, match="no region"):
            await client.advertise(record.source_id, 1, [(0, 5)])
        await client.advertise(record.source_id, 2, [])
        (source,) = (await client.resolve("llama")).sources
        assert (source.generation, source.table.held) == (2, ())
        await client.deregister(record.source_id)
        with pytest.raises(UnknownSourceError):
            await client.advertise(record.source_id, 3, [])


async def collect(updates: AsyncIterator[WatchUpdate], until: WatchKind) -> list[WatchUpdate]:
    found = []
    async for update in updates:
        found.append(update)
        if update.kind is until:
            return found
    raise AssertionError("the watch ended")


async def test_a_watch_begins_with_what_there_is_and_coalesces() -> None:
    async with coordinator(lease_s=60.0) as client:
        record = await register(client, held=())
        await register(client, name="not watched")
        async with aclosing(client.watch("llama")) as updates:
            snapshot = await collect(updates, WatchKind.SNAPSHOT_END)
            assert [(u.kind, u.record) for u in snapshot] == [
                (WatchKind.UP, record),
                (WatchKind.SNAPSHOT_END, None),
            ]
            begun_s = time.monotonic()
            for _ in range(100):
                await client.advertise(record.source_id, 1, [(0, 1)])
                await client.advertise(record.source_id, 1, [(0, 4)])
            # Listed for a moment only: watchers need no event, and get none if it is a short one.
            fleeting = await register(client)
            await client.deregister(fleeting.source_id)
            await client.deregister(record.source_id)
            rest = await collect(updates, WatchKind.GONE)
            if rest[-1].record is not None and rest[-1].record.source_id == fleeting.source_id:
                rest += await collect(updates, WatchKind.GONE)
            batches = (time.monotonic() - begun_s) / INTERVAL_S + 1
        assert rest[-1].reason == "deregistered"
        assert rest[-1].record is not None and rest[-1].record.source_id == record.source_id
        layers = [u for u in rest if u.kind is WatchKind.LAYERS]
        assert len(layers) <= batches  # of 200 changes


async def test_watchers_get_a_draining_source() -> None:
    async with coordinator(lease_s=3.0) as client:
        record = await register(client)
        now = [record]
        alive = asyncio.create_task(
            client.keep_alive(
                lambda: now[0],
                lambda: register_at(client, now[0], by_digest(DOCUMENTS), source_secret=SECRET),
            )
        )
        try:
            async with aclosing(client.watch()) as updates:
                await collect(updates, WatchKind.SNAPSHOT_END)
                now[0] = replace(record, state=SourceState.DRAINING)
                assert (await anext(updates)).record == now[0]
            assert (await client.resolve("llama")).sources == []
        finally:
            alive.cancel()
            await asyncio.gather(alive, return_exceptions=True)


async def test_health_and_reflection_answer() -> None:
    async with coordinator() as client:
        check: Any = health_pb2_grpc.HealthStub(client.link.channel)
        for service in ("", "mx.wire.v1.Coordinator", "mx.wire.v1.Documents"):
            answer = await check.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflect: Any = reflection_pb2_grpc.ServerReflectionStub(client.link.channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflect.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
            assert "mx.wire.v1.Coordinator" in names and "mx.wire.v1.Documents" in names


async def test_names_are_checked_before_they_are_sent() -> None:
    async with coordinator() as client:
        for name in ("", "a\nb", "llama@zz"):
            with pytest.raises(ConfigError):
                await client.resolve(name)
        with pytest.raises(UnknownModelError, match="nothing is registered"):
            await client.resolve("llama")


@pytest.mark.parametrize("spec", ["sqlite:", "redis://", "redis://h/0?prefix=a-b", "what", ""])
def test_states_that_are_not_there(spec: str) -> None:
    with pytest.raises(ConfigError):
        open_state(spec)


def test_no_part_of_a_password_is_in_the_error() -> None:
    with pytest.raises(ConfigError) as refused:
        open_state("redis://:S3cret/xyz@h:6379/0")
    assert "S3cret" not in str(refused.value) and "xyz" not in str(refused.value)


def test_a_capacity_error_is_not_this_machines() -> None:
    assert not issubclass(CoordinatorError, CapacityError) and issubclass(CapacityError, MxError)


@pytest.mark.parametrize("answer", [b"\xff\xff", b"", pb.ResolveResponse().SerializeToString()])
async def test_a_coordinator_that_answers_nonsense_is_an_error(answer: bytes) -> None:
    async def resolve(request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata(headers())
        return answer

    server: Any = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(resolve)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("mx.wire.v1.Coordinator", {"Resolve": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = CoordinatorClient(f"127.0.0.1:{port}")
    try:
        with pytest.raises(CoordinatorError):
            await client.resolve("llama")
        with pytest.raises(CoordinatorError, match="is not an mx coordinator"):
            await client.list_models()
    finally:
        await client.close()
        await server.stop(None)


# -- pulls ------------------------------------------------------------------------------------


def a_pull(number: int = 1, **changes: Any) -> PullStatus:
    fields: dict[str, Any] = {
        "pull_id": str(uuid.UUID(int=number)),
        "model": ModelKey("llama", "main", "checkpoint"),
        "host": "host",
        "pid": 1,
        "phase": PullPhase.RUNNING,
        "layers": 4,
        "ready": 0b1,
        "nbytes": 100,
        "done_bytes": 10,
        "seconds": 1.0,
    }
    return PullStatus(**(fields | changes))


async def test_a_pull_that_reports_its_progress_is_listed() -> None:
    async with coordinator() as client:
        assert (await client.overview()).pulls == ()
        async with client.reporting() as report:
            await report(a_pull())
            await report(a_pull(done_bytes=50, ready=0b11))
            while [pull.done_bytes for pull in (await client.overview()).pulls] != [50]:
                await asyncio.sleep(0.01)
            assert (await client.overview("other")).pulls == ()
            await report(a_pull(done_bytes=100, ready=0b1111, phase=PullPhase.COMPLETE))
        (seen,) = (await client.overview("llama")).pulls
        assert seen.phase is PullPhase.COMPLETE and seen.layers_ready == 4


async def test_a_pull_that_is_cut_off_has_failed() -> None:
    async with coordinator() as client:
        with pytest.raises(KeyError):
            async with client.reporting() as report:
                await report(a_pull())
                while not (await client.overview()).pulls:
                    await asyncio.sleep(0.01)
                raise KeyError
        while (await client.overview()).pulls[0].phase is not PullPhase.FAILED:
            await asyncio.sleep(0.01)


async def test_invalid_reports_and_reports_on_others_pulls_are_refused() -> None:
    async with coordinator() as client:
        async with client.reporting() as report:
            await report(a_pull())
            while not (await client.overview()).pulls:
                await asyncio.sleep(0.01)
            with pytest.raises(NotAllowedError):
                async with client.reporting() as report_too:
                    await report_too(a_pull())
            with pytest.raises((CoordinatorError, PeerProtocolError)):
                async with client.reporting() as report_invalid:
                    await report_invalid(a_pull(2, done_bytes=101))
        assert len((await client.overview()).pulls) == 1


async def test_many_pulls_come_in_pages() -> None:
    async with coordinator() as client, AsyncExitStack() as stack:
        clients = [CoordinatorClient(client.remote.address) for _ in range(8)]
        for each in clients:
            stack.push_async_callback(each.close)
        for number in range(400):
            report = await stack.enter_async_context(clients[number % 8].reporting())
            await report(a_pull(number, layers=1 << 16, ready=(1 << (1 << 16)) - 1))
        while len((await client.overview()).pulls) < 400:
            await asyncio.sleep(0.01)
