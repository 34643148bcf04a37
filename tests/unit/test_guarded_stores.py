"""What mx gives up waiting for in a store of another distribution."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Iterable, Iterator

import pytest

from mx.errors import ClosedError, StoreError
from mx.remote import guarded
from mx.remote.guarded import GuardedStore
from mx.stores import ListedFile, Opening

FILE = ListedFile("a.safetensors", 8)


class HeldStore:
    """A store whose calls wait where they are told to."""

    def __init__(self, holds: str = "") -> None:
        self.go, self.closed, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.place, self.threads = "held", 1000
        self._holds = holds

    def made(self) -> HeldStore:
        self.wait("made")
        return self

    def wait(self, call: str) -> None:
        if call == self._holds:
            self.go.wait(30)

    def list(self) -> Iterable[ListedFile]:
        self.wait("list")
        return [FILE]

    def read(self, file: ListedFile, offset: int, view: memoryview) -> int:
        used = (ctypes.c_char * len(view)).from_buffer(view)  # as a call of the system uses it
        self.wait("read")
        ctypes.memset(used, ord("x"), len(view))
        self.ended.set()
        return len(view)

    def close(self) -> None:
        self.wait("close")
        self.closed.set()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_a_read_that_is_given_up_writes_to_nothing_of_ours(
    loop: asyncio.AbstractEventLoop,
) -> None:
    held = HeldStore("read")
    store = GuardedStore(held.made, "held", Opening(lambda: False, loop, 0.1))
    assert store.threads == 64 and store.list() == [FILE]
    data = bytearray(8)
    with memoryview(data) as view, pytest.raises(StoreError, match=r"held/a.*no answer"):
        store.read(FILE, 0, view)
    held.go.set()
    assert held.ended.wait(30) and data == bytes(8)
    store.close()
    assert held.closed.is_set()
    with memoryview(data) as view, pytest.raises(ClosedError):
        store.read(FILE, 0, view)


def test_a_call_ends_once_the_pull_is_closed(loop: asyncio.AbstractEventLoop) -> None:
    held, closed = HeldStore("list"), threading.Event()
    store = GuardedStore(held.made, "held", Opening(closed.is_set, loop, 600.0))
    threading.Timer(0.1, closed.set).start()
    with pytest.raises(ClosedError):
        store.list()
    held.go.set()
    store.close()


def test_a_store_that_is_made_too_late_is_closed(loop: asyncio.AbstractEventLoop) -> None:
    held = HeldStore("made")
    with pytest.raises(StoreError, match="no answer"):
        GuardedStore(held.made, "held", Opening(lambda: False, loop, 0.1))
    held.go.set()
    assert held.closed.wait(30)


def test_a_close_that_hangs_is_not_waited_for(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded, "_CLOSE_S", 0.1)
    held = HeldStore("close")
    store = GuardedStore(held.made, "held", Opening(lambda: False, loop, 600.0))
    began_s = time.monotonic()
    store.close()
    store.close()
    assert time.monotonic() - began_s < 30 and not held.closed.is_set()
    held.go.set()
    assert held.closed.wait(30)
