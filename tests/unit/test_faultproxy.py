"""The proxy does what it says, and only that: other tests rely on it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from mx.testing.faultproxy import FaultProxy
from tests.support.clock import ManualClock

MESSAGE = bytes(range(256)) * 1000


@contextmanager
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets, to one connection after another."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                try:
                    while data := sock.recv(65536):
                        sock.sendall(data)
                except OSError:
                    continue

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def through(proxy: FaultProxy) -> bytes:
    """What comes back of MESSAGE."""
    back = b""
    with socket.create_connection(proxy.address, timeout=10) as sock:

        def send() -> None:
            sock.sendall(MESSAGE)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            while data := sock.recv(65536):
                back += data
        finally:
            sender.join()
    return back


def test_without_faults_everything_passes() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        assert through(proxy) == MESSAGE
        assert proxy.down.passed_nbytes == len(MESSAGE)


@pytest.mark.parametrize("offset", [0, 1000, len(MESSAGE) - 1])
def test_a_bit_is_flipped(offset: int) -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.down.flip(offset)
        back = through(proxy)
        assert [i for i in range(len(MESSAGE)) if back[i] != MESSAGE[i]] == [offset]


def test_garbage_from_an_offset_on() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.down.garbage(5000)
        back = through(proxy)
        assert back[:5000] == MESSAGE[:5000]
        assert len(back) == len(MESSAGE)
        assert back[5000:6000] != MESSAGE[5000:6000]


def test_truncated_in_good_order() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.down.truncate(70_000)
        with socket.create_connection(proxy.address, timeout=10) as sock:
            sock.sendall(MESSAGE[:100_000])
            back = b""
            while data := sock.recv(65536):
                back += data
        assert back == MESSAGE[:70_000]


def test_once_befalls_the_first_connection_only() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.down.flip(200_000, once=True)
        assert sum(a != b for a, b in zip(through(proxy), MESSAGE, strict=True)) == 1
        assert through(proxy) == MESSAGE
        proxy.down.garbage(1000, once=True)
        noisy = through(proxy)
        assert noisy[:1000] == MESSAGE[:1000]
        assert noisy[200_000:] != MESSAGE[200_000:]  # to its end, in however many pieces
        assert through(proxy) == MESSAGE
        proxy.up.truncate(3000, once=True)
        with socket.create_connection(proxy.address, timeout=10) as sock:
            sock.sendall(MESSAGE[:5000])
            back = b""
            with suppress(ConnectionResetError):
                while data := sock.recv(65536):
                    back += data
        assert MESSAGE[:3000].startswith(back)
        assert through(proxy) == MESSAGE


def test_stalled_then_resumed() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        proxy.down.stall()
        with socket.create_connection(proxy.address) as sock:
            sock.sendall(b"hello")
            sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                sock.recv(5)
            sock.settimeout(10)
            proxy.down.resume()
            assert sock.recv(5, socket.MSG_WAITALL) == b"hello"


def test_cut_ends_what_is_open_and_takes_new_ones() -> None:
    with echo() as target, FaultProxy(target) as proxy:
        with socket.create_connection(proxy.address, timeout=10) as sock:
            sock.sendall(b"hello")
            assert sock.recv(5, socket.MSG_WAITALL) == b"hello"
            proxy.cut()
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        assert through(proxy) == MESSAGE


def test_manual_clock_stands_still() -> None:
    clock = ManualClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    assert clock.advance(2.5) == clock() == 7.5
    with pytest.raises(ValueError, match="go back"):
        clock.advance(-1)
