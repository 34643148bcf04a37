"""Many sources at once: real coordinator, real load, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import pytest

from mx.core.types import SourceRole
from mx.core.versions import headers
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.daemon import ROOT, daemon
from tests.support.records import by_digest, make_documents, make_record, register_at

pytestmark = pytest.mark.integration

LOAD = ROOT / "benchmarks" / "coordinator_load.py"


@pytest.mark.timeout(240)
def test_some_hundred_sources_register_at_once_and_none_is_lost() -> None:
    sizes = ("--sources=300", "--watchers=10", "--resolves=20", "--seconds=2")
    with daemon(lease_s=20.0) as (_, address):
        ran = subprocess.run(
            [sys.executable, str(LOAD), address, *sizes],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=200,
        )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["registered"] == 300 and found["lost"] == {}, found
    assert found["events"] >= 10 * 300, found


@pytest.mark.timeout(120)
async def test_calls_that_wait_for_the_event_loop_are_not_cancelled() -> None:
    """More calls than the coordinator takes at once: it is stopped while they come."""
    count, channels = 2000, []
    with daemon() as (process, address):
        client = CoordinatorClient(address)
        try:
            assert await client.list_models() == []
            channels = [_patient(address) for _ in range(10)]
            asked = [channel.unary_unary("/mx.wire.v1.Coordinator/Missing") for channel in channels]
            request = pb.MissingRequest(digests=[b"d" * 32]).SerializeToString()
            for ask in asked:  # connected, so that all calls come together
                assert await ask(request, timeout=30, metadata=headers())
            process.send_signal(signal.SIGSTOP)
            calls = [
                asked[i % len(asked)](request, timeout=90, metadata=headers()) for i in range(count)
            ]
            await asyncio.sleep(0.5)  # into the sockets
            process.send_signal(signal.SIGCONT)
            codes = await asyncio.gather(*(call.code() for call in calls))
            assert {code: codes.count(code) for code in codes} == {grpc.StatusCode.OK: count}
        finally:
            process.send_signal(signal.SIGCONT)
            await client.close()
            for channel in channels:
                await channel.close(None)


def _patient(address: str) -> Any:
    """A connection that does not mind that the other end stands still."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    return grpc.aio.insecure_channel(address, options=options)


async def test_the_heartbeat_of_a_source_that_is_late_finds_it_still_listed() -> None:
    """Its stream waits behind others' registrations: the first lease is longer."""
    documents = make_documents("A")
    record = make_record(documents)
    with daemon(lease_s=2.0) as (_, address):
        client = CoordinatorClient(address)
        channel: Any = dial(address)
        try:
            await register_at(client, record, by_digest(documents), source_secret=b"s" * 32)
            (status,) = await client.list_sources()
            assert status.lease_left_s > 2.0
            beat = channel.stream_stream("/mx.wire.v1.Coordinator/Heartbeat")(metadata=headers())
            request = pb.HeartbeatRequest(
                source_id=record.source_id,
                source_secret=b"s" * 32,
                state=pb.SOURCE_STATE_SERVING,
            )
            await beat.write(request.SerializeToString())
            assert await beat.read()
            (status,) = await client.list_sources()
            assert status.lease_left_s <= 2.0
            beat.cancel()
        finally:
            await client.close()
            await channel.close(None)


@pytest.mark.timeout(120)
async def test_of_more_sources_than_an_answer_has_each_answer_names_others() -> None:
    documents = make_documents("A")
    with daemon(lease_s=60.0) as (_, address):
        client = CoordinatorClient(address)
        try:
            for _ in range(300):
                record = make_record(documents, role=SourceRole.RELAY)
                await register_at(client, record, by_digest(documents), source_secret=b"s" * 32)
            answers = [await client.resolve(record.model.name) for _ in range(12)]
            named = [{source.source_id for source in answer.sources} for answer in answers]
            assert {len(each) for each in named} == {256}
            assert {answer.source_count for answer in answers} == {300}
            assert len(set.union(*named)) == 300
        finally:
            await client.close()
