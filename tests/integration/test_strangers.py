"""Strangers on other addresses take what there is: honest clients get on with their work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx import api, codec
from mx.core.digest import document_digest
from mx.core.types import ManifestRef, SourceRecord
from mx.errors import MxError
from mx.units import MIB
from mx.wire.channel import dial
from mx.wire.client import CoordinatorClient
from mx.wire.documents import pages
from mx.wire.v1 import coordinator_pb2 as pb
from mx.wire.versions import headers
from tests.support.daemon import ended, python
from tests.support.records import by_digest, make_documents, make_record
from tests.support.strangers import seen_from

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SECRET = b"s" * 32
SERVICE = "/mx.wire.v1.Coordinator/"
STRANGER = "127.0.0.2"

#: A coordinator with room for 16 MiB of documents.
_SMALL = """
import asyncio, signal, sys
from mx.coordinator.daemon import Coordinator
from mx.coordinator.state import MemoryState

async def main():
    coordinator = Coordinator(state=MemoryState(document_limit_bytes=16 << 20))
    print(await coordinator.start("127.0.0.1:0"), file=sys.stderr, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@contextmanager
def small_coordinator() -> Iterator[str]:
    with ended(python(_SMALL)) as process:
        assert process.stderr is not None
        yield process.stderr.readline().strip()


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(address, timeout_s=60.0)
    try:
        yield client
    finally:
        await client.close()


async def register(client: CoordinatorClient, documents: list[bytes], name: str) -> str:
    """Return "listed", or the name of the error."""
    record = make_record(documents, name=name)
    try:
        await client.register(record, by_digest(documents), binding_secret=SECRET)
    except MxError as error:
        return f"{type(error).__name__}: {error.message}"
    return "listed"


async def honest_work(address: str, checkpoint: Path) -> None:
    """Serve a checkpoint from this machine's usual address, and pull it."""

    def serve_and_pull() -> None:
        with (
            api.serve(checkpoint, model="honest", coordinator=address),
            api.pull("honest", coordinator=address) as pull,
        ):
            pull.wait(60)

    try:
        await asyncio.to_thread(serve_and_pull)
        happened = "pulled"
    except MxError as error:
        happened = f"{type(error).__name__}: {error.message}"
    assert happened == "pulled"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose manifest has some ten thousand bytes."""
    tensors = {f"model.layers.{n}.weight": np.full(8, n, np.float32) for n in range(300)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


#: What a stranger tries in turn, so that no room is left between what it has taken.
SIZES_BYTES = (2 * MIB, 256 << 10, 32 << 10, 4 << 10, 64)


async def test_documents_from_one_address_leave_room_for_others(checkpoint: Path) -> None:
    refused: list[str] = []
    with small_coordinator() as address, seen_from(STRANGER, address) as there:
        async with client_of(there) as stranger:
            for nbytes in SIZES_BYTES:
                for number in range(20):
                    label = f"{nbytes}.{number}"
                    documents = make_documents(label, layout=label, files=label, nbytes=nbytes)
                    answer = await register(stranger, documents, label)
                    if answer != "listed":
                        refused.append(answer)
                        break
        await honest_work(address, checkpoint)
    assert refused and all(STRANGER in answer for answer in refused), refused


async def test_uploads_that_do_not_end_leave_room_for_others(checkpoint: Path) -> None:
    """Each of the streams sends most of three documents, and nothing more."""
    with small_coordinator() as address, seen_from(STRANGER, address) as there:
        channel: Any = dial(there)
        streams: list[Any] = []
        try:
            async with client_of(address) as client:
                for nbytes in SIZES_BYTES:
                    for number in range(20):
                        streams.append(await half_register(channel, f"{nbytes}.{number}", nbytes))
                        await client.list_models()  # meanwhile the pages are received
                        await asyncio.sleep(0.05)
                        if streams[-1].done():  # refused: what it has sent is let go
                            break
            await honest_work(address, checkpoint)
        finally:
            for stream in streams:
                stream.cancel()
            await channel.close(None)


async def half_register(channel: Any, label: str, nbytes: int) -> Any:
    documents = make_documents(label, layout=label, nbytes=nbytes)
    source = codec.source_to_wire(make_record(documents, name=label), binding_secret=SECRET)
    stream = channel.stream_unary(SERVICE + "Register")(metadata=headers())
    await stream.write(pb.RegisterRequest(source=source).SerializeToString())
    for each in documents[:2]:
        for page in pages(document_digest(each), each):
            if not stream.done():
                await stream.write(pb.RegisterRequest(page=page).SerializeToString())
    return stream


def junk(number: int) -> tuple[SourceRecord, list[bytes]]:
    documents = [f"{kind} {number}".encode().ljust(MIB, b".") for kind in ("a", "b", "c")]
    digests = [document_digest(each) for each in documents]
    ref = ManifestRef(digests[0], digests[1], MIB, digests[2], (MIB, MIB, MIB))
    record = make_record(make_documents("A"), name=f"junk{number}")
    return replace(
        record, ref=ref, table=replace(record.table, layout_digest=ref.layout)
    ), documents


async def test_what_can_not_be_decoded_is_refused_and_not_held() -> None:
    with small_coordinator() as address:
        async with client_of(address) as client:
            for number in range(8):  # each would take a fifth of the room
                record, documents = junk(number)
                try:
                    await client.register(record, by_digest(documents), binding_secret=SECRET)
                    answer = "listed"
                except MxError as error:
                    answer = f"{type(error).__name__}: {error.message}"
                assert answer.startswith("ManifestError") and "decoded" in answer
                digests = [digest for digest, _ in record.ref.documents]
                missing = await client._stub.Missing(pb.MissingRequest(digests=digests))
                assert set(missing.digests) == set(digests)
            assert await client.list_models() == []
            documents = make_documents("A")
            assert await register(client, documents, "llama") == "listed"
            # Documents of two manifests do not make a third.
            others = make_documents("B", layout="other", nbytes=MIB)
            assert await register(client, others, "other") == "listed"
            mixed = [documents[0], *others[1:]]
            assert (await register(client, mixed, "mixed")).startswith("ManifestError")
