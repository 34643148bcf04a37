"""Closing: it can be interrupted and called again, and what it frees is free at once."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from mx import api, runtime
from mx.errors import ClosedError, LocalError
from mx.transport import host_view
from tests.support.commands import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOM_BYTES = 40 << 20


def is_free(buffer: bytearray) -> bool:
    """Does nothing refer to its memory? Else it can't change its size."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    return True


PATHS: dict[str, dict[str, Any]] = {
    "shm": {"transport": "shm"},
    "tcp": {"transport": "tcp"},
    "strong": {"verify": "strong"},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", ["m", "slow"])
def test_the_callers_buffer_is_free_once_the_pull_is_closed(
    served: str, uncollected: None, model: str, path: str
) -> None:
    buffer = bytearray(ROOM_BYTES)
    pull = api.pull(model, coordinator=served, into=memoryview(buffer), **PATHS[path])
    if model == "m":
        pull.wait(60)
        assert not is_free(buffer)
    else:
        next(pull.layers())
    pull.close()
    assert is_free(buffer)


def test_the_callers_buffer_is_free_though_the_error_is_kept(
    served: str, uncollected: None
) -> None:
    caller = threading.current_thread()

    def refuse(event: api.LayerEvent) -> None:
        if threading.current_thread() is not caller:
            raise KeyError(event.name)

    buffer = bytearray(ROOM_BYTES)
    pull = api.pull("slow", coordinator=served, into=memoryview(buffer))
    # Once it has begun, so that the callback is called on the thread that has read the layer.
    next(pull.layers())
    pull.on_layer(refuse)
    with pytest.raises(LocalError) as caught:
        pull.wait(60)
    pull.close()
    assert isinstance(caught.value.__cause__, KeyError)
    assert is_free(buffer)


@pytest.mark.parametrize(
    "options",
    [{"attach": False}, {"attach": True}, {"hold": True}, {"attach": False, "transport": "tcp"}],
)
def test_memory_of_mxs_own_is_free_once_the_pull_is_closed(
    served: str, uncollected: None, options: dict[str, Any]
) -> None:
    pull = api.pull("m", coordinator=served, **options)
    pull.wait(60)
    mapping = weakref.ref(pull.buffer().obj)
    arena = pull._job.edition.arena
    assert arena is not None
    memory = [mapping, weakref.ref(host_view(arena.view).obj)]
    if "hold" in options:
        pull.hold()
    pull.close()
    assert [ref() for ref in memory] == [None, None]


def test_an_interrupted_close_goes_on_when_it_is_called_again(
    served: str, uncollected: None
) -> None:
    buffer = bytearray(ROOM_BYTES)
    pull = api.pull("slow", coordinator=served, into=memoryview(buffer))
    next(pull.layers())
    loop, go_on = runtime.acquire(), threading.Event()

    async def occupy() -> None:
        go_on.wait()

    occupied = loop.submit(occupy())  # nothing is closed as long as it lasts
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            pull.close()
        assert not is_free(buffer)
    finally:
        go_on.set()
        interrupt.join()
    pull.close()
    assert is_free(buffer)
    with pytest.raises(ClosedError):
        pull.wait(0)
    occupied.result()
    runtime.release(loop)


def test_an_interrupted_close_of_a_source_goes_on_when_it_is_called_again(
    run: Run, served: str, checkpoint: Path
) -> None:
    source = api.serve(checkpoint, model="n", coordinator=served)
    loop, go_on = runtime.acquire(), threading.Event()

    async def occupy() -> None:
        go_on.wait()

    occupied = loop.submit(occupy())
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt.start()
            source.close()
        assert not source.wait(0)
    finally:
        go_on.set()
        interrupt.join()
    source.close()
    assert source.wait(0)
    assert not api.list_sources("n", coordinator=served)
    occupied.result()
    runtime.release(loop)
