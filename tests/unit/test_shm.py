"""What is particular to shm: sealed or nothing, one uid, hostile sources and readers."""

import json
import mmap
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mx import buffers
from mx.core.topology import Place
from mx.errors import (
    NotAllowedError,
    PathError,
    PeerLostError,
    PeerProtocolError,
    PeerTimeoutError,
    SourceError,
)
from mx.testing.bench import Bench, BenchSource
from mx.testing.harness import Harness
from mx.testing.memory import Kind, Memory
from mx.transport import ExposedRegion, ExposeOptions, Piece, Read, host_view
from mx.units import MIB
from mx_transports.shm import ShmTransport
from mx_transports.shm import exposure as shm_exposure
from mx_transports.shm import session as shm_session
from mx_transports.toolkit import exposure as sockets
from mx_transports.toolkit import framing, kernel

TARGET = "mx_transports.shm:ShmTransport"
NOBODY = 65534


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Bench(Harness(TARGET, stall_timeout_s=1.5)) as made:
        yield made


def connected(ticket: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(10)
    sock.connect(b"\0" + json.loads(ticket)["socket"].encode())
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except ConnectionResetError:
        return True


def as_nobody(code: str, *arguments: str) -> str:
    """Return what `code` prints in a process that gives up being root at `become_nobody()`."""
    boot = (
        "import json, os, sys\n"
        "sys.path[:] = json.loads(sys.argv.pop())\n"
        f"become_nobody = lambda: os.geteuid() or os.setuid({NOBODY})\n"
    )
    command = [sys.executable, "-c", boot + code, *arguments, json.dumps(sys.path)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def altered(ticket: bytes, **changes: object) -> bytes:
    return json.dumps(json.loads(ticket) | changes).encode()


# --- a source that lies


@contextmanager
def lying(bench: Bench, memory: Memory, nbytes: int, descriptor: int) -> Iterator[BenchSource]:
    """A source that hands out `descriptor`, whatever it is, as a region of `nbytes`."""
    exposure = ShmTransport().expose([memory.region(0)], ExposeOptions())
    assert isinstance(exposure, shm_exposure.ShmExposure)
    exposure._regions = [(shm_exposure.ENTRY.pack(0, nbytes, 4096, True, 0), descriptor)]
    exposure.set_generation(1)
    try:
        yield BenchSource(exposure, [memory])
    finally:
        exposure.close()
        assert exposure.join(10)


def test_an_unsealed_memfd_is_not_attached_whatever_the_source_says(bench: Bench) -> None:
    memory = Memory(MIB, 1)
    memfd = os.memfd_create("mx-testing", os.MFD_ALLOW_SEALING)
    os.write(memfd, memory.expected)
    with lying(bench, memory, MIB, memfd) as source:
        session = bench.open(source)
        for seal in (0, kernel.F_SEAL_SHRINK, kernel.F_SEAL_GROW, kernel.F_SEAL_FUTURE_WRITE):
            kernel.add_seals(memfd, seal)
            with pytest.raises(NotAllowedError, match="sealed"):
                session.attach(0)
        buffers.seal(memfd, kernel.F_SEAL_WRITE)
        view = session.attach(0)
        assert host_view(view).tobytes() == memory.expected
        del view
    os.close(memfd)
    memory.close()


@pytest.mark.parametrize("nbytes", [0, MIB - 1, MIB + 1, 1 << 62])
def test_a_memfd_of_another_size_is_not_attached(bench: Bench, nbytes: int) -> None:
    memory = Memory(MIB, 1)
    assert memory.memfd is not None
    with lying(bench, memory, nbytes, memory.memfd) as source:
        session = bench.open(source)
        with pytest.raises(NotAllowedError, match="as large"):
            session.attach(0)
    memory.close()


def test_a_file_in_place_of_a_memfd_is_not_attached(
    bench: Bench, tmp_path: os.PathLike[str]
) -> None:
    memory = Memory(4096, 1)
    with open(os.path.join(tmp_path, "file"), "w+b") as file:
        file.write(bytes(4096))
        file.flush()
        with lying(bench, memory, 4096, file.fileno()) as source:
            session = bench.open(source)
            with pytest.raises(NotAllowedError, match="sealed"):
                session.attach(0)
    memory.close()


def test_a_memfd_that_was_cut_off_is_an_error_not_a_crash(bench: Bench) -> None:
    memory = Memory(4 * MIB, 1, Kind.UNSEALED)
    assert memory.memfd is not None
    with lying(bench, memory, 4 * MIB, memory.memfd) as source:
        session = bench.open(source)
        os.ftruncate(memory.memfd, MIB)
        sink = bench.read(session, 0, 0, memoryview(bytearray(4 * MIB)))
        bench.failure(sink, PeerProtocolError, "chunk 0")
        bench.succeed(bench.read(session, 0, 0, memoryview(bytearray(MIB))))
    memory.close()


#: Stands for the address at which the source has memory.
HERE = 77_777


@contextmanager
def scattered_at(bench: Bench, columns: list[int], said: int) -> Iterator[BenchSource]:
    """A source that says that its region, of 4096 bytes, lies in `said` places."""
    memory = Memory(4096, 1, Kind.ANONYMOUS)
    exposure = ShmTransport().expose([memory.region(0)], ExposeOptions())
    assert isinstance(exposure, shm_exposure.ShmExposure)
    here = memory.region(0).address
    exposure._regions = [(shm_exposure.ENTRY.pack(0, 4096, here, False, said), None)]
    exposure._places = [array(shm_exposure.PLACE, (here if n == HERE else n for n in columns))]
    exposure._places[0].byteswap()
    exposure.set_generation(1)
    try:
        yield BenchSource(exposure, [memory])
    finally:
        exposure.close()
        assert exposure.join(10)
        memory.close()


_NUMBERS = st.one_of(
    st.integers(0, 4096), st.sampled_from([4097, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
)
_PLACES = st.tuples(_NUMBERS, st.one_of(st.just(HERE), _NUMBERS), _NUMBERS)


@settings(max_examples=60, deadline=None)
@given(
    places=st.lists(_PLACES, min_size=1, max_size=4),
    reads=st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 4096)), min_size=1, max_size=4),
)
@example(places=[(16, HERE, 100)], reads=[(16, 100), (20, 7), (0, 16), (100, 17), (116, 1), (0, 0)])
def test_any_list_of_places_is_refused_or_gives_no_byte_that_is_not_there(
    places: list[tuple[int, int, int]], reads: list[tuple[int, int]]
) -> None:
    places.sort()
    columns = [place[i] for i in range(3) for place in places]
    model: dict[int, int | None] = {}  # byte of the region -> byte of the memory
    for begin, address, nbytes in places:
        for at in range(min(nbytes, 4097)):
            model[begin + at] = at if address == HERE else None
    with (
        Bench(Harness(TARGET, stall_timeout_s=5.0)) as bench,
        scattered_at(bench, columns, len(places)) as source,
    ):
        try:
            session = bench.open(source)
        except PeerProtocolError as error:
            assert "malformed" in str(error) or "can't be read" in str(error)
            return
        memory = source.memories[0].expected
        for offset, nbytes in reads:
            wanted = range(offset, offset + min(nbytes, 4096 - offset))
            destination = memoryview(bytearray(len(wanted)))
            sink = bench.read(session, 0, offset, destination)
            bench.finish(sink)
            found = [model.get(at) for at in wanted]
            if None in found:
                assert sink.failures and not sink.dones
            elif sink.dones:
                assert destination == bytes(memory[at] for at in found if at is not None)


def test_more_places_than_any_model_has_are_refused_before_they_are_received(bench: Bench) -> None:
    most = shm_exposure.MAX_PLACES
    with (
        scattered_at(bench, [0, HERE, 4096], most + 1) as source,
        pytest.raises(PeerProtocolError, match="too long"),
    ):
        bench.open(source)


def test_fewer_places_than_said_are_not_waited_for_long(bench: Bench) -> None:
    with scattered_at(bench, [0, HERE, 4096], 2) as source, pytest.raises(PeerTimeoutError):
        bench.open(source)


def test_an_address_with_nothing_there_is_refused_at_once(bench: Bench) -> None:
    memory = Memory(MIB, 1, Kind.ANONYMOUS)
    region = memory.region(0)
    wrong = ExposedRegion(0, region.view, 4096)
    exposure = ShmTransport().expose([wrong], ExposeOptions())
    try:
        with pytest.raises(PeerProtocolError, match="can't be read"):
            bench.open(BenchSource(exposure, [memory]))
    finally:
        exposure.close()
        assert exposure.join(10)
    del region, wrong
    memory.close()


def test_memory_unmapped_in_the_middle_is_an_error(bench: Bench) -> None:
    memory = Memory(MIB, 1, Kind.ANONYMOUS)
    region = memory.region(0)
    longer = mmap.mmap(-1, 4 * MIB)
    exposure = ShmTransport().expose(
        [ExposedRegion(0, memoryview(longer), region.address)], ExposeOptions()
    )
    exposure.set_generation(1)
    with ExitStack() as stack:
        stack.callback(lambda: exposure.join(10))
        stack.callback(exposure.close)
        session = bench.open(BenchSource(exposure, [memory]), sizes=(1 << 60,))
        # Far beyond what is mapped, or in another's memory: refused first, by the sizes.
        sink = bench.read(session, 0, 4 * MIB, memoryview(bytearray(1)), tag="beyond")
        bench.failure(sink, SourceError, "beyond")
    del region
    memory.close()


# --- identities


def test_another_process_in_the_source_s_place(bench: Bench) -> None:
    source = bench.source(4096)
    grant_id, ticket = source.grant()
    for changes, kind in (
        ({"pid": os.getppid()}, PeerProtocolError),
        ({"pid": 1 << 22}, PeerLostError),
        ({"start_ticks": 1}, PeerLostError),
        ({"socket": "mx-shm-no-listener"}, PeerLostError),
        ({"pid": "1"}, PeerProtocolError),
        ({"pid": -1}, PeerProtocolError),
        ({"socket": "x" * 200}, PeerProtocolError),
        ({"socket": "mx-\ud800"}, PeerProtocolError),
    ):
        with pytest.raises(kind):
            bench.open_ticket(grant_id, altered(ticket, **changes), source.sizes, tls=None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_uid_is_not_let_in(bench: Bench) -> None:
    source = bench.source(4096)
    _, ticket = source.grant()
    code = (
        "import socket\n"
        "become_nobody()\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(b'\\0' + sys.argv[1].encode())\n"
        "s.settimeout(10)\n"
        "try: print('open' if s.recv(1) else 'closed')\n"
        "except ConnectionResetError: print('closed')\n"
    )
    assert as_nobody(code, json.loads(ticket)["socket"]) == "closed\n"


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "another"},
        {"uid": 1},
        {"pid_namespace": 9},
        {"net_namespace": 9},
        {"user_namespace": 9},
        {"device": "cuda:GPU-1"},
    ],
)
def test_reach_is_within_one_kernel_and_uid(change: dict[str, object]) -> None:
    here: dict[str, object] = {"boot_id": "boot", "uid": 0, "pid": 1}
    near = Place(**here)  # type: ignore[arg-type]
    path = ShmTransport().reach(near, Place(**(here | {"pid": 2})))  # type: ignore[arg-type]
    assert path is not None
    assert path.attach
    assert ShmTransport().reach(near, Place(**(here | change))) is None  # type: ignore[arg-type]


def test_nothing_is_said_of_unknown_places() -> None:
    assert ShmTransport().reach(Place(), Place()) is None


# --- hostile readers


@settings(max_examples=25)
@given(noise=st.binary(min_size=1, max_size=200))
def test_noise_at_the_socket_changes_nothing(noise: bytes) -> None:
    with Bench(Harness(TARGET)) as bench:
        source = bench.source(4096)
        _, ticket = source.grant()
        with connected(ticket) as sock:
            sock.sendall(noise)
            with suppress(OSError):  # it may have hung up already
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(64))))


def test_half_open_connections_are_dropped_and_do_not_shut_others_out(bench: Bench) -> None:
    source = bench.source(4096)
    _, ticket = source.grant()
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(ticket)) for _ in range(3 * sockets.MAX_UNPROVED)]
        bench.succeed(bench.read(bench.open(source), 0, 0, memoryview(bytearray(64))))
        assert all(is_closed(sock) for sock in idle)


def test_another_version_of_the_transport_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bench.source(4096)
    monkeypatch.setattr(shm_session, "MAGIC", shm_exposure.MAGIC[:-1] + b"\4")
    with pytest.raises(PathError, match="speaks version 3 .* speaks 4"):
        bench.open(source)


def test_a_reader_that_sends_an_unexpected_message_is_cut(bench: Bench) -> None:
    source = bench.source(4096)
    _, ticket = source.grant()
    document = json.loads(ticket)
    with connected(ticket) as sock:
        key, secret = bytes.fromhex(document["key"]), bytes.fromhex(document["secret"])
        sock.sendall(framing.PREAMBLE.pack(shm_exposure.MAGIC, key, secret))
        with suppress(OSError):  # it may hang up on what it has not read
            sock.sendall(b"BBBIx")
            while sock.recv(4096):
                pass
    bench.eventually(lambda: source.exposure.active_readers() == 0, lambda: "still active")


def test_many_regions_with_and_without_descriptors(bench: Bench) -> None:
    memories = [Memory(512 + n, n, Kind.SEALED if n % 3 else Kind.ANONYMOUS) for n in range(150)]
    exposure = ShmTransport().expose([m.region(n) for n, m in enumerate(memories)], ExposeOptions())
    exposure.set_generation(1)
    with ExitStack() as stack:
        for memory in memories:
            stack.callback(memory.close)
        stack.callback(lambda: exposure.join(10))
        stack.callback(exposure.close)
        session = bench.open(BenchSource(exposure, memories))
        stack.callback(lambda: session.join(10))
        stack.callback(session.close)
        views = [memoryview(bytearray(memory.nbytes)) for memory in memories]
        sink = bench.sink()
        session.read([Read("all", [Piece(n, 0, view) for n, view in enumerate(views)], sink)])
        bench.succeed(sink)
        assert [view.tobytes() for view in views] == [memory.expected for memory in memories]


def test_what_the_kernel_says_about_reading_processes() -> None:
    one = memoryview(bytearray(1))
    with pytest.raises(PeerLostError):
        kernel.read_process(1 << 22, [(4096, one)], "peer")
    with pytest.raises(PeerProtocolError, match="Bad address"):
        kernel.read_process(os.getpid(), [(4096, one)], "peer")
    code = (
        "from mx.errors import PeerRefusedError\n"
        "from mx_transports.toolkit import kernel\n"
        "become_nobody()\n"
        "try: kernel.read_process(1, [(4096, memoryview(bytearray(1)))], 'peer')\n"
        "except PeerRefusedError as error: print(error.hint)\n"
    )
    assert "ptrace_scope" in as_nobody(code)
    assert kernel.start_ticks(os.getpid()) > 0
    assert kernel.start_ticks(1 << 22) == -1


@pytest.mark.parametrize("places", [0, 1])
def test_addresses_beyond_the_last_one_are_refused(bench: Bench, places: int) -> None:
    """Of a region in one place, and of a place of a scattered one."""
    last = (1 << 64) - 16
    with scattered_at(bench, [0, last, 4096][: 3 * places], places) as source:
        exposure = source.exposure
        assert isinstance(exposure, shm_exposure.ShmExposure)
        exposure._regions = [(shm_exposure.ENTRY.pack(0, 4096, last, False, places), None)]
        with pytest.raises(PeerProtocolError, match="is malformed"):
            bench.open(source)
