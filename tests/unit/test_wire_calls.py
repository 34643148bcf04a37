"""A call that is cut is over, in any state; and the error of one that fails is mx's alone."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from mx.errors import CoordinatorError
from mx.wire.channel import cut, dial
from mx.wire.client import CoordinatorClient


async def _answers(requests: AsyncIterator[bytes], context: Any) -> None:
    """Sends much, reads nothing, and ends."""
    for _ in range(10):
        await context.write(b"x" * 1000)


async def _status_is_awaited() -> bool:
    """Return True if gRPC still waits for the end of a call."""
    return any("_handle_status_once_received" in repr(task) for task in asyncio.all_tasks())


@pytest.mark.parametrize("writes", [True, False])
async def test_a_call_with_unread_messages_is_released(writes: bool) -> None:
    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(_answers)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s.S", {"M": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = dial(f"127.0.0.1:{port}")
    try:
        methods: Any = channel
        call = methods.stream_stream("/s.S/M")()
        await call.read()
        if writes:
            with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
                while True:  # until the end
                    await call.write(b"more")
                    await asyncio.sleep(0.01)
        cut(call)
        cut(call)
        for _ in range(200):
            if not await _status_is_awaited():
                break
            await asyncio.sleep(0.01)
        assert not await _status_is_awaited()
    finally:
        await channel.close(None)
        await server.stop(0)


async def test_an_error_shows_no_traceback_of_grpc() -> None:
    client = CoordinatorClient("127.0.0.1:1")
    try:
        with pytest.raises(CoordinatorError, match="connection refused") as caught:
            await client.resolve("llama")
    finally:
        await client.close()
    assert "grpc/aio" not in "".join(traceback.format_exception(caught.value))
