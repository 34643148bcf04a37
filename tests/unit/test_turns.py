"""Many long calls of one address do not come before the one call of another."""

from __future__ import annotations

import asyncio

from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.records import by_digest, make_documents, make_record, registration


class Context:
    def __init__(self, address: str) -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:5000"

    def auth_context(self) -> dict[str, tuple[bytes, ...]]:
        return {}


async def test_lists_of_one_address_let_the_call_of_another_in() -> None:
    state = CoordinatorState(lease_s=600.0)
    servicer = CoordinatorServicer(state)
    documents = make_documents("A")
    for _ in range(500):
        await state.register(registration(make_record(documents), b"s" * 32), by_digest(documents))
    listed: list[int] = []

    async def list_all() -> None:
        request = pb.ListSourcesRequest()
        pages = servicer.ListSources(request, Context("10.0.0.1"))
        listed.append(sum([len(page.sources) async for page in pages]))

    tasks = [asyncio.create_task(list_all()) for _ in range(50)]
    request = pb.ResolveRequest(name="llama")
    resolving = asyncio.create_task(servicer.Resolve(request, Context("10.0.0.2")))
    found = await resolving
    before = len(listed)
    await asyncio.gather(*tasks)
    assert found.sources and listed == [500] * 50
    assert before < 5
