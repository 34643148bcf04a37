"""Connections to a data port that have not proved themselves, more of them than there may be."""

from __future__ import annotations

import json
import select
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mx.testing.bench import Bench
from mx.testing.harness import Harness
from mx.transport import TlsFiles
from mx_transports.tcp import wire
from mx_transports.toolkit import exposure, framing
from mx_transports.toolkit.listeners import UnprovedConnection, dispensable, host_of
from mx_transports.toolkit.tls import tls_context

TARGET = "mx_transports.tcp:TcpTransport"
HONEST, HOG = "127.0.0.2", "127.0.0.3"
MOST = exposure.MAX_UNPROVED


@pytest.fixture(autouse=True)
def slow_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the number of connections ends one here."""
    monkeypatch.setattr(exposure, "PREAMBLE_DEADLINE_S", 60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Port:
    """A source's data port, and connections to it."""

    def __init__(self, bench: Bench, stack: ExitStack) -> None:
        self._source = bench.source(4096)
        self._stack = stack
        document = json.loads(self._source.grant()[1])
        self.number = document["addresses"][0][1]

    def connected(self, host: str) -> socket.socket:
        return self._stack.enter_context(
            socket.create_connection(("127.0.0.1", self.number), 30, source_address=(host, 0))
        )

    def preamble(self) -> bytes:
        document = json.loads(self._source.grant()[1])
        key, secret = bytes.fromhex(document["key"]), bytes.fromhex(document["secret"])
        return framing.PREAMBLE.pack(wire.MAGIC, key, secret)

    def flooded(self, *hosts: str, says: bytes = b"") -> None:
        """Connect twice as often as there may be connections. When this returns the source has
        dropped as many as there may be."""
        poll = select.poll()
        for number in range(2 * MOST):
            hog = self.connected(hosts[number % len(hosts)])
            hog.sendall(says)
            poll.register(hog, select.POLLIN)
        until_s = time.monotonic() + 30
        while len(poll.poll(100)) < MOST:  # the source sends nothing
            assert time.monotonic() < until_s


def is_let_in(sock: socket.socket, preamble: bytes) -> bool:
    try:
        sock.sendall(preamble)
        hello = sock.recv(framing.HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return False
    return hello == framing.HELLO.pack(wire.MAGIC, framing.OK)


@pytest.mark.parametrize("begun", [0, 1, framing.PREAMBLE.size - 1])
@pytest.mark.parametrize("says", [b"", wire.MAGIC], ids=["plain", "begun"])
def test_one_address_takes_no_place_of_another(stack: ExitStack, begun: int, says: bytes) -> None:
    with Bench(Harness(TARGET)) as bench:
        port = Port(bench, stack)
        waiting = [(port.connected(HONEST), port.preamble()) for _ in range(20)]
        for sock, preamble in waiting:
            sock.sendall(preamble[:begun])
        port.flooded(HOG, says=says)
        assert [is_let_in(sock, preamble[begun:]) for sock, preamble in waiting] == [True] * 20


def test_nor_do_many_addresses(stack: ExitStack) -> None:
    """Each of which has more than this one."""
    with Bench(Harness(TARGET)) as bench:
        port = Port(bench, stack)
        sock, preamble = port.connected(HONEST), port.preamble()
        port.flooded(*(f"127.0.1.{number}" for number in range(MOST // 2)))
        assert is_let_in(sock, preamble)


def test_what_says_nothing_takes_no_place_of_what_has_begun(stack: ExitStack) -> None:
    """All of one address, such as that of a router between them and the source."""
    with Bench(Harness(TARGET)) as bench:
        port = Port(bench, stack)
        waiting = [(port.connected(HOG), port.preamble()) for _ in range(20)]
        for sock, preamble in waiting:
            sock.sendall(preamble[:1])
        port.flooded(HOG)
        assert [is_let_in(sock, preamble[1:]) for sock, preamble in waiting] == [True] * 20


def test_a_handshake_of_tls_keeps_its_place(
    stack: ExitStack, authorities: tuple[TlsFiles, TlsFiles]
) -> None:
    tls = authorities[0]
    with Bench(Harness(TARGET, tls=tls)) as bench:
        port = Port(bench, stack)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        session = tls_context(tls, server=False).wrap_bio(incoming, outgoing)
        sock = port.connected(HOG)
        with pytest.raises(ssl.SSLWantReadError):
            session.do_handshake()
        sock.sendall(outgoing.read())
        incoming.write(sock.recv(1 << 16))  # it has begun
        port.flooded(HOG)
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                incoming.write(sock.recv(1 << 16))
        session.write(port.preamble())
        sock.sendall(outgoing.read())
        hello = b""
        while not hello:
            data = sock.recv(1 << 16)
            assert data
            incoming.write(data)
            try:
                hello = session.read(framing.HELLO.size)
            except ssl.SSLWantReadError:
                continue
        assert hello == framing.HELLO.pack(wire.MAGIC, framing.OK)


#: Connects a thousand times a second, from one address, for some seconds or until its input ends.
FLOOD = """
import select, socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
made, began_s = [], time.monotonic()
for number in range(int(1000 * seconds)):
    wait_s = max(0.0, began_s + number / 1000 - time.monotonic())
    if select.select([sys.stdin], [], [], wait_s)[0]:
        break
    made.append(socket.socket())
    made[-1].setblocking(False)
    made[-1].bind((host, 0))
    made[-1].connect_ex(("127.0.0.1", port))
    if len(made) > 500:
        made.pop(0).close()
    if number == 200:
        print("floods", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("host", [HONEST, HOG], ids=["another address", "the same address"])
def test_twenty_handshakes_while_one_address_connects_a_thousand_times_a_second(
    stack: ExitStack, host: str
) -> None:
    """From another address a reader may take its time; from the same one it has begun at once."""
    with Bench(Harness(TARGET)) as bench:
        port = Port(bench, stack)
        with subprocess.Popen(
            [sys.executable, "-S", "-c", FLOOD, HOG, str(port.number), "30"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as flood:
            assert flood.stdin is not None and flood.stdout is not None
            try:
                assert flood.stdout.readline() == "floods\n"
                let_in = []
                for _ in range(20):
                    sock, preamble = port.connected(host), port.preamble()
                    begun = 1 if host == HOG else 0
                    sock.sendall(preamble[:begun])
                    time.sleep(0.2)
                    let_in.append(is_let_in(sock, preamble[begun:]))
                assert flood.poll() is None
            finally:
                flood.stdin.close()
    assert let_in == [True] * 20


def test_a_network_of_ipv6_is_one_host() -> None:
    one, same, other = (
        host_of(socket.AF_INET6, (address, 1, 0, 0))
        for address in ("2001:db8::1", "2001:db8::ffff:2", "2001:db8:0:1::1")
    )
    assert one == same != other
    assert host_of(socket.AF_INET, ("10.0.0.1", 1)) != host_of(socket.AF_INET, ("10.0.0.2", 1))
    assert host_of(socket.AF_UNIX, "") == host_of(socket.AF_UNIX, b"\0name")


def test_of_equal_shares_the_oldest_goes() -> None:
    with socket.socket() as sock:
        hosts = [b"a", b"b", b"a", b"b", b"c"]
        unproved = [UnprovedConnection(sock, host, 0.0, False) for host in hosts]
        assert dispensable(unproved) is unproved[0]
        assert dispensable(unproved[1:]) is unproved[1]
        unproved[3].begun = True
        assert dispensable(unproved[1:]) is unproved[1]
