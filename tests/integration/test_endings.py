"""However a pull, or a hold, ends: with the right error, at once, and with nothing lost."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mx import api, runtime
from mx.core.topology import Place
from mx.core.versions import headers
from mx.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    LocalError,
    PeerBusyError,
    PeerProtocolError,
    PeerTimeoutError,
    PeerUntrustedError,
    SourceChangedError,
    StaleGenerationError,
)
from mx.fetching.options import PullOptions
from mx.source.service import PeerServicer
from mx.wire.channel import dial
from mx.wire.lease import Lease
from mx.wire.locate import Locator
from mx.wire.server import Service, listen
from mx.wire.v1 import peer_pb2
from tests.support.commands import Run, free_port, serve
from tests.support.lying import held_model, offering
from tests.support.outcomes import error_of
from tests.support.records import make_documents, make_record

pytestmark = pytest.mark.integration


def flip_everything(view: memoryview) -> None:
    array = np.frombuffer(view, np.uint8)
    np.bitwise_not(array, out=array)


def test_disk_takes_over_though_the_first_attempt_had_begun_to_write(
    coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with (
        offering(held_model("m", corrupt=flip_everything), coordinator),
        api.pull("m", coordinator=coordinator, fallback=checkpoint, attach=False, out=out) as pull,
    ):
        assert pull.wait(30).fallback == "disk"
        assert pull.progress().layers_ready == 10
    assert (out / "model.safetensors").read_bytes() == checkpoint.read_bytes()


def test_a_pinned_identity_is_not_replaced_by_what_the_disk_holds(
    coordinator: str, checkpoint: Path
) -> None:
    pin = "0123456789abcdef"
    with api.pull(f"m@{pin}", coordinator=coordinator, fallback=checkpoint) as pull:
        error = error_of(pull)
    assert isinstance(error, CheckpointError)
    assert "0123456789abcdef" in str(error)


def test_disk_does_not_help_against_errors_of_our_own(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    (tmp_path / "taken").write_text("in use")
    options = {"coordinator": coordinator, "fallback": tmp_path / "nowhere"}
    with api.pull("m", out=tmp_path / "taken", **options) as pull:  # type: ignore[arg-type]
        error = error_of(pull)
    assert isinstance(error, ConfigError)
    assert "taken" in str(error)


@pytest.mark.parametrize("options", [{}, {"attach": False}, {"verify": "strong", "attach": False}])
def test_a_callback_that_raises_fails_the_pull(
    coordinator: str, options: dict[str, object]
) -> None:
    def refuse(event: api.LayerEvent) -> None:
        if event.index == 11:
            raise KeyError("mine")

    with (
        offering(held_model("m"), coordinator),
        api.pull("m", coordinator=coordinator, **options) as pull,  # type: ignore[arg-type]
    ):
        try:
            pull.on_layer(refuse)
        except KeyError:
            return  # the layers were there already: it was raised here
        error = error_of(pull)
    assert isinstance(error, LocalError)
    assert isinstance(error.__cause__, KeyError)


def test_a_blocking_call_in_a_callback_is_an_error_not_a_deadlock(coordinator: str) -> None:
    loop = runtime.acquire()

    async def block() -> None:
        loop.run(asyncio.sleep(0))

    try:
        with pytest.raises(ConfigError, match="callback"):
            loop.run(block())
    finally:
        runtime.release(loop)


def test_what_is_held_is_lost_neither_with_its_source_nor_with_its_failure(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    expected = load_file(checkpoint)
    listed = api.list_sources("m", coordinator=coordinator)
    none_opened = f"127.0.0.1:{free_port()}"
    peer = listed[0].record.endpoint
    with api.pull("m", peer=peer, coordinator=none_opened, hold=True) as pull:
        pull.wait(30)
        with pytest.raises(CoordinatorError):
            pull.hold()
        assert torch.equal(pull.state_dict()["model.norm.weight"], expected["model.norm.weight"])
    with api.pull("m", coordinator=coordinator, hold=True) as pull:
        source = pull.hold()
        assert pull.hold() is source
        source.close()
        assert torch.equal(pull.state_dict()["model.norm.weight"], expected["model.norm.weight"])


def test_a_layer_comes_with_what_is_tied_to_it(coordinator: str) -> None:
    tied = torch.arange(64.0).reshape(8, 8)
    tensors = {
        "model.embed_tokens.weight": tied,
        "model.layers.0.mlp.weight": torch.ones(3),
        "lm_head.weight": tied,
    }
    with (
        api.serve(tensors, model="m", coordinator=coordinator),
        api.pull("m", coordinator=coordinator) as pull,
    ):
        found = [set(pull.layer_state_dict(event.index)) for event in pull.layers()]
        assert set().union(*found) == tensors.keys()
        assert sum(map(len, found)) == len(tensors)
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= found[0]
        for index in (-1, len(found)):
            with pytest.raises(IndexError):
                pull.layer_state_dict(index)


def test_into_may_be_any_writable_buffer_and_nothing_else(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    room: Any = np.zeros(32 << 20, np.uint8).view(np.float32)
    with api.pull("m", coordinator=coordinator, into=room) as pull:
        assert pull.wait(30).layers == 10
        filled = pull.state_dict()["model.norm.weight"].view(torch.uint8).clone()
    assert torch.equal(filled, load_file(checkpoint)["model.norm.weight"].view(torch.uint8))
    wrong: Any
    for wrong in (bytes(10), room[::2], 10):
        with pytest.raises(ConfigError, match="into"):
            api.pull("m", coordinator=coordinator, into=wrong)


# -- sources that answer nonsense -----------------------------------------------------------------


class OddPeer(PeerServicer):
    """Answers `Open` with the events it was made with, then stays silent."""

    def __init__(self, *events: peer_pb2.OpenEvent, forever: peer_pb2.OpenEvent | None = None):
        self._events = events
        self._forever = forever

    async def Open(self, requests: Any, context: Any) -> None:
        for event in self._events:
            await context.write(event)
        reading = asyncio.create_task(self._read(requests))
        while self._forever is not None and not reading.done():
            await context.write(self._forever)
            await asyncio.sleep(0.01)
        await reading

    @staticmethod
    async def _read(requests: Any) -> None:
        async for _ in requests:
            pass


def granted(lease_s: float) -> peer_pb2.OpenEvent:
    return peer_pb2.OpenEvent(granted=peer_pb2.Granted(grant_id="g", lease_s=lease_s))


async def lease_on(
    peer: OddPeer, use: Callable[[Lease], Any], read_nbytes: Callable[[], int] = lambda: 0
) -> None:
    service = Service(peer_pb2.DESCRIPTOR.services_by_name["Peer"], peer)
    listening = await listen("127.0.0.1:0", [service])
    address = f"127.0.0.1:{listening.port}"
    channel = dial(address)
    source = make_record(make_documents("a"), endpoint=address)
    lease = Lease(channel, source, lambda: None, read_nbytes)
    try:
        await use(lease)
    finally:
        await lease.close()
        assert lease.check() is not None  # what is read after it is not believed
        await channel.close(None)
        await listening.stop(0)


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, 0.0, -1.0])
def test_a_lease_that_is_no_length_is_refused(lease_s: float) -> None:
    async def use(lease: Lease) -> None:
        with pytest.raises(PeerProtocolError, match="lease"):
            await lease.open(Place(), ["tcp"], 5.0)

    asyncio.run(lease_on(OddPeer(granted(lease_s)), use))


def test_a_method_that_ends_before_it_reads_leaves_nothing_unawaited() -> None:
    class Silent(OddPeer):
        async def Open(self, requests: Any, context: Any) -> None:
            await context.write(granted(60.0))

    async def use(lease: Lease) -> None:
        await lease.open(Place(), ["tcp"], 5.0)

    asyncio.run(lease_on(Silent(), use))
    gc.collect()  # a generator that never ran would warn here, and warnings are errors


SAID = {
    "busy": (peer_pb2.OpenEvent(busy=peer_pb2.Busy(retry_after_s=0.5)), PeerBusyError),
    "updated": (peer_pb2.OpenEvent(stale=peer_pb2.Stale(generation=2)), StaleGenerationError),
    "written": (
        peer_pb2.OpenEvent(stale=peer_pb2.Stale(generation=2, changed=True)),
        SourceChangedError,
    ),
}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("said", SAID)
def test_what_a_source_says_when_a_lease_is_given_back_is_heard(
    said: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mx.wire.lease._GIVE_BACK_S", 60.0)
    event, kind = SAID[said]

    class LateWords(OddPeer):
        async def Open(self, requests: Any, context: Any) -> None:
            await context.write(granted(60.0))
            await self._read(requests)
            await context.write(event)

    async def use(lease: Lease) -> None:
        await lease.open(Place(), ["tcp"], 5.0)
        lease.end(lost=lost)
        assert type(lease.check()) is ClosedError
        await lease.close()
        assert type(lease.check()) is kind

    asyncio.run(lease_on(LateWords(), use))


def test_a_lease_whose_place_was_given_to_another_says_when_to_ask_again() -> None:
    async def use(lease: Lease) -> None:
        await lease.open(Place(), ["tcp"], 5.0)
        async with asyncio.timeout(30):
            while (error := lease.check()) is None:
                await asyncio.sleep(0.01)
        assert isinstance(error, PeerBusyError) and error.retry_after_s == 0.5

    busy = peer_pb2.OpenEvent(busy=peer_pb2.Busy(retry_after_s=0.5))
    asyncio.run(lease_on(OddPeer(granted(60.0), busy), use))


def test_a_lease_that_was_ended_while_a_connection_was_lost_says_why() -> None:
    class Strict(OddPeer):
        told: asyncio.Event

        async def Open(self, requests: Any, context: Any) -> None:
            await context.write(granted(60.0))
            await self.told.wait()
            raise PeerUntrustedError("you may not pull any more")

    async def use(lease: Lease) -> None:
        await lease.open(Place(), ["tcp"], 5.0)
        peer.told.set()
        lease.end(lost=True)
        await lease.close()
        assert isinstance(lease.check(), PeerUntrustedError)

    def busy() -> int:  # the loop, while the stream ends
        time.sleep(0.05)
        return 1

    for _ in range(10):
        peer = Strict()
        peer.told = asyncio.Event()
        asyncio.run(lease_on(peer, use, busy))


def test_a_source_that_only_ever_drains_is_given_up() -> None:
    draining = peer_pb2.OpenEvent(draining=peer_pb2.Draining(grace_s=1.0))

    async def use(lease: Lease) -> None:
        with pytest.raises(PeerTimeoutError):
            await lease.open(Place(), ["tcp"], 0.3)

    asyncio.run(lease_on(OddPeer(forever=draining), use))


def test_a_description_that_does_not_parse_is_the_peers_error() -> None:
    async def check() -> None:
        async def garbage(request: bytes, context: Any) -> bytes:
            context.set_trailing_metadata(headers())
            return b"\xff\xff\xff garbage"

        server = grpc.aio.server()
        handlers = {"Describe": grpc.unary_unary_rpc_method_handler(garbage)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("mx.wire.v1.Peer", handlers),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        locator = Locator(PullOptions("m", peer=f"127.0.0.1:{port}"))
        try:
            with pytest.raises(PeerProtocolError):
                await locator.locate()
        finally:
            await locator.close()
            await server.stop(0)

    asyncio.run(check())
