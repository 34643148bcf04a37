"""What is particular to tcp: faults on the wire, hostile readers and sources, TLS."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.roots import root_of
from mx.core.topology import Place
from mx.errors import (
    ConfigError,
    LocalError,
    MxError,
    PathError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SourceError,
)
from mx.testing.bench import Bench, BenchSource
from mx.testing.faultproxy import FaultProxy
from mx.testing.harness import GENERATION, Harness
from mx.transport import ExposeOptions, Piece, Read, Session, TlsFiles
from mx.units import MIB
from mx_transports.tcp import TcpTransport, wire
from mx_transports.tcp.session import AHEAD_REQUESTS, MOST_AHEAD_REQUESTS, TcpSession
from mx_transports.toolkit import exposure as sockets
from mx_transports.toolkit import framing
from mx_transports.toolkit.pieces import PIECE

TARGET = "mx_transports.tcp:TcpTransport"
HEADER = framing.HELLO.size + wire.RESPONSE.size


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(Harness(TARGET, stall_timeout_s=1.5)) as made:
        yield made


def address_of(ticket: bytes) -> tuple[str, int]:
    host, port = json.loads(ticket)["addresses"][0]
    return host, port


def reroute(ticket: bytes, *addresses: tuple[str, int]) -> bytes:
    return json.dumps(json.loads(ticket) | {"addresses": addresses}).encode()


Proxied = Callable[[BenchSource, int], tuple[FaultProxy, Session]]


@pytest.fixture
def proxied(bench: Bench) -> Iterator[Proxied]:
    with ExitStack() as stack:

        def make(source: BenchSource, streams: int = 1) -> tuple[FaultProxy, Session]:
            grant_id, ticket = source.grant()
            proxy = stack.enter_context(FaultProxy(address_of(ticket)))
            ticket = reroute(ticket, proxy.address)
            return proxy, bench.open_ticket(
                grant_id, ticket, source.sizes, streams=streams, tls=None
            )

        yield make


def test_a_flipped_bit_arrives_and_the_digest_differs(bench: Bench, proxied: Proxied) -> None:
    source = bench.source(3 * MIB)
    proxy, session = proxied(source, 1)
    proxy.down.flip(HEADER + 2_000_000)
    view = memoryview(bytearray(3 * MIB))
    bench.succeed(bench.read(session, 0, 0, view))
    expected = source.memories[0].expected
    assert [i for i, (a, b) in enumerate(zip(view, expected, strict=True)) if a != b] == [2_000_000]
    assert root_of(view) != root_of(expected)


def test_a_stall_runs_into_the_deadline(bench: Bench, proxied: Proxied) -> None:
    nbytes = 64 * MIB  # more than all the buffers on the way can hold when the stall begins
    source = bench.source(nbytes)
    proxy, session = proxied(source, 1)
    held = bench.held_read(session, memoryview(bytearray(nbytes)), "running")
    proxy.down.stall()
    queued = bench.read(session, 0, 0, memoryview(bytearray(64)), tag="queued")
    held.release()
    bench.failure(held, PeerTimeoutError, "running")
    bench.failure(queued, SourceError, "queued")


def test_slow_is_not_stalled(bench: Bench, proxied: Proxied) -> None:
    source = bench.source(MIB)
    proxy, session = proxied(source, 1)
    proxy.down.throttle(1e6)  # A MiB takes twice the stall timeout.
    view = memoryview(bytearray(MIB))
    bench.succeed(bench.read(session, 0, 0, view))
    assert view.tobytes() == source.memories[0].expected


@pytest.mark.parametrize("offset", [framing.HELLO.size, HEADER, HEADER + 1, HEADER + MIB])
def test_a_truncated_stream_is_a_lost_peer(bench: Bench, proxied: Proxied, offset: int) -> None:
    source = bench.source(2 * MIB)
    proxy, session = proxied(source, 1)
    proxy.down.truncate(offset)
    sink = bench.read(session, 0, 0, memoryview(bytearray(2 * MIB)))
    bench.failure(sink, PeerLostError, "chunk 0")
    later = bench.read(session, 0, 0, memoryview(bytearray(64)), tag="later")
    bench.failure(later, PeerLostError, "later")


def test_without_its_last_status_a_read_is_not_done(bench: Bench, proxied: Proxied) -> None:
    source = bench.source(MIB)
    proxy, session = proxied(source, 1)
    proxy.down.truncate(HEADER + MIB)
    bench.failure(bench.read(session, 0, 0, memoryview(bytearray(MIB))), PeerLostError, "chunk 0")


def test_garbage_instead_of_a_response(bench: Bench, proxied: Proxied) -> None:
    source = bench.source(MIB)
    proxy, session = proxied(source, 1)
    proxy.down.garbage(framing.HELLO.size)
    sink = bench.read(session, 0, 0, memoryview(bytearray(MIB)))
    bench.failure(sink, PeerProtocolError, "chunk 0")


def test_garbage_instead_of_a_greeting(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    with FaultProxy(address_of(ticket)) as proxy:
        proxy.down.garbage(0)
        with pytest.raises(PeerProtocolError, match="does not speak"):
            bench.open_ticket(grant_id, reroute(ticket, proxy.address), source.sizes, tls=None)


def test_the_other_connections_go_on(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    with FaultProxy(address_of(ticket)) as proxy:
        ticket = reroute(ticket, address_of(ticket), proxy.address)
        session = bench.open_ticket(grant_id, ticket, source.sizes, streams=2, tls=None)
        proxy.cut()
        sinks = [bench.read(session, 0, n, memoryview(bytearray(64))) for n in range(200)]
        bench.finish(*sinks)
        # Only what had gone to the lost connection before the loss was noticed.
        assert sum(len(sink.failures) for sink in sinks) <= AHEAD_REQUESTS
        bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(MIB))))


def test_a_source_that_refuses_more_connections_is_read_over_those_there_are(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_CONNECTIONS_PER_GRANT", 3)
    source = bench.source(MIB)
    session = bench.open(source, streams=2)
    assert isinstance(session, TcpSession)
    session.grow(6)
    bench.eventually(
        lambda: session.open_streams == 3, lambda: f"{session.open_streams} connections are open"
    )
    sinks = [bench.read(session, 0, 0, memoryview(bytearray(MIB))) for _ in range(20)]
    bench.succeed(*sinks)
    assert not any(sink.failures for sink in sinks) and session.open_streams == 3


def test_a_session_ends_while_a_connection_is_being_opened(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    with FaultProxy(address_of(ticket)) as proxy:
        ticket = reroute(ticket, proxy.address)
        session = bench.open_ticket(grant_id, ticket, source.sizes, streams=1, tls=None)
        assert isinstance(session, TcpSession)
        bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(MIB))))
        proxy.down.stall()  # the source's greeting does not come
        before = proxy.up.passed_nbytes
        session.grow(3)
        bench.eventually(
            lambda: proxy.up.passed_nbytes >= before + 2 * framing.PREAMBLE.size,
            lambda: "no connection was opened",
        )
        assert not session.join(0.1)
        session.close()
        assert session.join(30)
        session.grow(4)
        assert session.join(0)


def test_requests_go_out_as_far_ahead_as_the_way_is_long() -> None:
    frame_nbytes = wire.REQUEST.size + PIECE.size
    with Bench(Harness(TARGET, stall_timeout_s=10)) as bench:
        source = bench.source(MIB)
        grant_id, ticket = source.grant()
        with FaultProxy(address_of(ticket)) as proxy:
            ticket = reroute(ticket, proxy.address)
            session = bench.open_ticket(grant_id, ticket, source.sizes, streams=1, tls=None)
            assert isinstance(session, TcpSession)
            assert session.round_trip_s == 0
            before = proxy.up.passed_nbytes
            sinks = [bench.sink(hold=number == 10) for number in range(80)]
            views = [memoryview(bytearray(MIB)) for _ in sinks]
            proxy.down.stall()
            session.read(
                [
                    Read("chunk 0", [Piece(0, 0, view)], sink)
                    for view, sink in zip(views, sinks, strict=True)
                ]
            )
            bench.eventually(
                lambda: proxy.up.passed_nbytes >= before + frame_nbytes, lambda: "nothing was asked"
            )
            time.sleep(1)
            proxy.down.resume()
            bench.wait(sinks[10].held, "the eleventh read did not land")
            assert session.round_trip_s >= 1

            def asked() -> int:
                return (proxy.up.passed_nbytes - before) // frame_nbytes

            bench.eventually(
                lambda: asked() >= 10 + 2 * AHEAD_REQUESTS, lambda: f"only {asked()} were asked for"
            )
            assert asked() <= 10 + MOST_AHEAD_REQUESTS
            sinks[10].release()
            bench.succeed(*sinks)


def test_an_address_that_does_not_answer_is_skipped(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()
    ticket = reroute(ticket, dead, address_of(ticket))
    session = bench.open_ticket(grant_id, ticket, source.sizes, streams=3, tls=None)
    bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(MIB))))


def test_no_listener(bench: Bench) -> None:
    source = bench.source(MIB)
    grant_id, ticket = source.grant()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()
    with pytest.raises(PeerLostError, match="refused"):
        bench.open_ticket(grant_id, reroute(ticket, dead), source.sizes, tls=None)


# --- hostile readers


def enter(ticket: bytes, magic: bytes = wire.MAGIC) -> socket.socket:
    """A connection that has presented a ticket, its greeting not yet read."""
    document = json.loads(ticket)
    sock = socket.create_connection(address_of(ticket), timeout=10)
    key, secret = bytes.fromhex(document["key"]), bytes.fromhex(document["secret"])
    sock.sendall(framing.PREAMBLE.pack(magic, key, secret))
    return sock


def entered(ticket: bytes) -> socket.socket:
    sock = enter(ticket)
    hello = sock.recv(framing.HELLO.size, socket.MSG_WAITALL)
    assert framing.HELLO.unpack(hello) == (wire.MAGIC, framing.OK)
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


@settings(max_examples=25)
@given(noise=st.binary(min_size=1, max_size=200))
def test_noise_at_the_socket_changes_nothing(noise: bytes) -> None:
    with Bench(Harness(TARGET)) as bench:
        source = bench.source(4096)
        _, ticket = source.grant()
        with socket.create_connection(address_of(ticket)) as sock:
            sock.settimeout(10)
            sock.sendall(noise)
            with suppress(OSError):  # it may have hung up already
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(64))))


def test_another_transports_magic_is_refused(bench: Bench) -> None:
    _, ticket = bench.source(4096).grant()
    with enter(ticket, b"mxshm\0\0\1") as sock:
        assert is_closed(sock)


def test_another_version_of_the_transport_is_refused_with_the_own_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bench.source(4096)
    for version in (0, 2, 255):
        _, ticket = source.grant()
        with enter(ticket, wire.MAGIC[:-1] + bytes([version])) as sock:
            hello = sock.recv(framing.HELLO.size, socket.MSG_WAITALL)
            assert framing.HELLO.unpack(hello) == (wire.MAGIC, framing.REFUSED)
            assert is_closed(sock)
    monkeypatch.setattr(wire, "MAGIC", wire.MAGIC[:-1] + b"\2")
    with pytest.raises(PathError, match="speaks version 1 .* speaks 2"):
        bench.open(source)


def test_half_open_connections_are_dropped_and_do_not_shut_others_out(bench: Bench) -> None:
    source = bench.source(4096)
    _, ticket = source.grant()
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(address_of(ticket), timeout=10))
            for _ in range(3 * sockets.MAX_UNPROVED)
        ]
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(64))))
        assert all(is_closed(sock) for sock in idle)


@pytest.mark.parametrize(
    "pieces",
    [
        [(0, 4096, 1)],
        [(0, (1 << 64) - 1, 1)],
        [(0, (1 << 64) - 1, (1 << 64) - 1)],
        [(0, 0, 1), (0, 1, 4096)],
        [(1, 0, 1)],
        [((1 << 32) - 1, 0, 0)],
    ],
)
def test_forged_requests_get_a_status_and_no_bytes(
    bench: Bench, pieces: list[tuple[int, int, int]]
) -> None:
    _, ticket = bench.source(4096).grant()
    with entered(ticket) as sock:
        for request_id in (7, 8):
            frame = wire.REQUEST.pack(request_id, GENERATION, len(pieces))
            sock.sendall(frame + b"".join(PIECE.pack(*piece) for piece in pieces))
            answer = sock.recv(wire.RESPONSE.size, socket.MSG_WAITALL)
            assert wire.RESPONSE.unpack(answer) == (request_id, framing.OUT_OF_RANGE, 0)


def test_a_request_without_end_is_cut(bench: Bench) -> None:
    _, ticket = bench.source(4096).grant()
    with entered(ticket) as sock:
        sock.sendall(wire.REQUEST.pack(0, GENERATION, (1 << 32) - 1))
        assert is_closed(sock)
    with entered(ticket) as sock:  # Half a request is given the stall timeout, no more.
        sock.sendall(wire.REQUEST.pack(0, GENERATION, 2))
        assert is_closed(sock)


def test_a_reader_that_takes_nothing_is_cut(bench: Bench) -> None:
    source = bench.source(48 * MIB)
    _, ticket = source.grant()
    with entered(ticket) as sock:
        frame = wire.REQUEST.pack(0, GENERATION, 1) + PIECE.pack(0, 0, 48 * MIB)
        sock.sendall(frame)
        bench.eventually(lambda: source.exposure.active_readers() == 1, lambda: "never active")
        bench.eventually(lambda: source.exposure.active_readers() == 0, lambda: "never cut")


def test_a_grant_has_only_so_many_connections(bench: Bench) -> None:
    source = bench.source(4096)
    grant_id, ticket = source.grant()
    with ExitStack() as stack:
        for _ in range(sockets.MAX_CONNECTIONS_PER_GRANT):
            stack.enter_context(entered(ticket))
        with pytest.raises(PeerRefusedError, match="too many"):
            bench.open_ticket(grant_id, ticket, source.sizes, tls=None)
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(64))))


def test_many_tiny_pieces_in_one_read(bench: Bench) -> None:
    source = bench.source(MIB)
    session = bench.open(source)
    view = memoryview(bytearray(5_000))
    pieces = [Piece(0, 7 * n % MIB, view[n : n + 1]) for n in range(len(view))]
    sink, too_many = bench.sink(), bench.sink()
    session.read([Read("tiny", pieces, sink), Read("more", pieces * 14, too_many)])
    bench.succeed(sink)
    expected = source.memories[0].expected
    assert view.tobytes() == bytes(expected[7 * n % MIB] for n in range(len(view)))
    bench.failure(too_many, LocalError, "more")


# --- addresses and TLS


def test_reach() -> None:
    transport = TcpTransport()
    near, far = Place(boot_id="a", addresses=("127.0.0.1",)), Place(boot_id="b")
    routed = Place(boot_id="b", addresses=("10.0.0.2",))
    assert transport.reach(near, near) is not None
    assert transport.reach(near, far) is None
    assert transport.reach(near, routed) is None
    assert transport.reach(Place(boot_id="a", addresses=("10.0.0.1",)), routed) is not None


def test_a_host_of_another_machine_can_not_be_listened_on() -> None:
    with pytest.raises(LocalError, match=r"192\.0\.2\.1"):
        TcpTransport().expose([], ExposeOptions(hosts=("127.0.0.1", "192.0.2.1")))


def test_tls_carries_the_same_bytes(authorities: tuple[TlsFiles, TlsFiles]) -> None:
    with Bench(Harness(TARGET, tls=authorities[0])) as bench:
        source = bench.source(5 * MIB + 1)
        view = memoryview(bytearray(source.sizes[0]))
        bench.succeed(bench.read(bench.open(source), 0, 0, view))
        assert view.tobytes() == source.memories[0].expected


def test_tls_notices_a_flipped_bit(authorities: tuple[TlsFiles, TlsFiles]) -> None:
    with Bench(Harness(TARGET, tls=authorities[0])) as bench:
        source = bench.source(MIB)
        grant_id, ticket = source.grant()
        with FaultProxy(address_of(ticket)) as proxy:
            session = bench.open_ticket(
                grant_id,
                reroute(ticket, proxy.address),
                source.sizes,
                streams=1,
                tls=authorities[0],
            )
            proxy.down.flip(proxy.down.passed_nbytes + 500_000)
            sink = bench.read(session, 0, 0, memoryview(bytearray(MIB)))
            bench.failure(sink, SourceError, "chunk 0")


@pytest.mark.parametrize(
    ("source_side", "reader_side"),
    [(0, None), (None, 0), (0, 1)],
    ids=["plain reader", "plain source", "another authority"],
)
def test_tls_refuses(
    authorities: tuple[TlsFiles, TlsFiles], source_side: int | None, reader_side: int | None
) -> None:
    def tls(side: int | None) -> TlsFiles | None:
        return None if side is None else authorities[side]

    with Bench(Harness(TARGET, tls=tls(source_side), stall_timeout_s=1.5)) as bench:
        source = bench.source(4096)
        grant_id, ticket = source.grant()
        with pytest.raises(SourceError) as caught:
            bench.open_ticket(grant_id, ticket, source.sizes, tls=tls(reader_side))
        assert isinstance(caught.value, MxError)


def test_tls_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for files in (
        TlsFiles("/no/where.pem", "/no/key.pem", "/no/ca.pem"),
        TlsFiles(*[str(empty)] * 3),
    ):
        with pytest.raises(ConfigError, match="PEM"):
            TcpTransport().expose([], ExposeOptions(tls=files))


def test_host_memory_needs_no_cuda() -> None:
    code = """
import sys
from mx.transport import ExposedRegion, ExposeOptions
from mx_transports.tcp import TcpTransport
region = ExposedRegion(0, memoryview(bytes(10)), 0)
exposure = TcpTransport().expose([region], ExposeOptions())
exposure.close()
exposure.join()
print([name for name in sys.modules if name.startswith(("mx.cuda", "cuda"))])
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert found.stdout == "[]\n"
