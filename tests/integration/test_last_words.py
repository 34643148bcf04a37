"""What a source says of why it ends a read counts, also where a transport notices the end first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mx import api, config
from mx.api.serving import serve_held
from mx.errors import IncompleteError
from mx.testing.faultproxy import FaultProxy
from mx.wire.v1 import peer_pb2
from tests.support.commands import free_port
from tests.support.lying import LAYER_NBYTES, held_model
from tests.support.outcomes import error_of, until

pytestmark = pytest.mark.integration


def one_wrong_byte(view: memoryview) -> None:
    view[LAYER_NBYTES] ^= 1


@contextmanager
def stalled_by(event: str, proxy: FaultProxy) -> Iterator[None]:
    """Hold back all that a source of this process says from its log's event on."""

    class Stall(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if event in record.getMessage():
                proxy.down.stall()

    handler, logger = Stall(), logging.getLogger("mx")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("transport", "follow", "first"),
    [
        ("tcp", False, "transport"),
        ("tcp", True, "transport"),
        ("tcp", True, "lease"),
        ("shm", True, "transport"),
    ],
)
def test_a_source_that_was_written_to_is_not_followed_whatever_is_heard_first(
    transport: str, follow: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mx.wire.lease._GIVE_BACK_S", 60.0)  # however slow this machine is
    port, own = free_port(), config.load({"insecure": True})
    with FaultProxy(("127.0.0.1", port)) as proxy:
        given = {
            "insecure": True,
            "listen": f"127.0.0.1:{port}",
            "advertise": f"127.0.0.1:{proxy.address[1]}",
            "reader_lease_s": 60.0,
            "max_bandwidth": "8MiB",
        }
        held = held_model("m", corrupt=one_wrong_byte)
        with (
            serve_held(held, None, config.load(given)) as source,
            stalled_by("source.withdrawn" if first == "transport" else "nothing", proxy),
            api.pull(
                "m",
                peer=source.endpoint,
                transport=transport,
                into=memoryview(bytearray(32 << 20)),
                follow=follow,
                settings=own,
            ) as pull,
        ):
            until(lambda: source.withdrawn, "withdrawal")
            until(lambda: source.stats().readers == 0, "end of the lease")
            proxy.down.resume()
            error = error_of(pull, 60)
        assert isinstance(error, IncompleteError), error
        assert "have changed" in error.message and error.hint == "start another source of them"


def test_who_asks_while_written_memory_is_being_withdrawn_is_told_why() -> None:
    lent = {"weight": torch.ones(1 << 20)}
    with api.serve(lent, model="m", copy=False, settings=config.load({"insecure": True})) as source:
        server = source._server
        lending, servicer = server.lending, server._servicer
        assert lending is not None

        async def ask() -> peer_pb2.Stale | None:
            (served,) = servicer.models.values()
            request = peer_pb2.OpenRequest(
                source_id=served.held.source_id, generation=served.held.generation
            )
            withdrawing = asyncio.create_task(lending._withdraw("written", written=True))
            await asyncio.sleep(0)  # one step of it
            try:
                return await servicer._looked_after(request)
            finally:
                await withdrawing

        stale = source._loop.run(ask())
        assert stale is not None and stale.changed
