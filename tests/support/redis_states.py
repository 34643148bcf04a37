"""Coordinators' states over one real Redis, and what a source does with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from mx.coordinator.state import CoordinatorState, open_state
from mx.core.registry import Registry
from mx.core.types import SourceRecord, SourceState
from tests.support.owners import owned
from tests.support.records import by_digest, make_documents, make_record, registration
from tests.support.redis_server import RedisServer, patience

DOCUMENTS, OTHERS = make_documents("A"), make_documents("B")
SECRET = b"s" * 16
KEY = b"k" * 32
PATIENCE_S = 60.0


@asynccontextmanager
async def states(
    server: RedisServer, many: int = 2, *, lease_s: float = 5.0, answer_s: float = 10.0
) -> AsyncIterator[list[CoordinatorState]]:
    """As many coordinators' states over one Redis, which has so long to answer."""
    async with AsyncExitStack() as stack:
        stack.enter_context(patience(answer_s))
        made = [open_state(server.url, lease_s=lease_s, key=KEY) for _ in range(many)]
        for state in made:
            stack.push_async_callback(state.close)
            await state.open()
            await state.tick()
        yield made


async def register(
    state: CoordinatorState,
    name: str = "llama",
    *,
    documents: list[bytes] = DOCUMENTS,
    owner: bytes = b"o",
) -> SourceRecord:
    record = owned(make_record(documents, name=name), owner)
    answer = await state.register(registration(record, SECRET), by_digest(documents))
    return answer.record


async def beat(state: CoordinatorState, record: SourceRecord, readers: int = 0) -> None:
    await state.event(
        lambda registry, now: registry.heartbeat(
            now, record.source_id, SECRET, SourceState.SERVING, readers=readers
        )
    )


async def end(state: CoordinatorState, record: SourceRecord) -> None:
    await state.event(lambda registry, now: registry.deregister(now, record.source_id, SECRET))


async def until(holds: Callable[[], object]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s
        await asyncio.sleep(0.02)


async def ids(state: CoordinatorState) -> set[str]:
    return {each.record.source_id for each in await state.ask(Registry.sources)}
