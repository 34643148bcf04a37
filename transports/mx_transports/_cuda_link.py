"""What a reader holds of a source of the GPU transports: connection, control page, mapped memory.

A `Link` is counted: the session and each view attached through it keep it, and the last to go
unmaps everything and then closes the connection, by which the source knows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence

from mx.cuda.errors import CudaError
from mx.errors import (
    PathError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx_transports import _cuda_wire as wire
from mx_transports import _frames as frames
from mx_transports import _vm as vm
from mx_transports._control import CONTROL, CONTROL_BYTES, peer_credentials
from mx_transports._cuda_maps import Maps
from mx_transports._cuda_wire import Allocation, Region, Where
from mx_transports._stream import Stream


def path_error(error: CudaError, path: str, peer: str) -> PathError:
    """CUDA's error as one of the path to `peer`, which others may do without."""
    return PathError(f"{peer} by {path}: {error.message}", peer=peer, hint=error.hint)


@contextlib.contextmanager
def translated(path: str, peer: str) -> Iterator[None]:
    """`path_error` for whatever fails inside."""
    try:
        yield
    except CudaError as error:
        raise path_error(error, path, peer) from error


class Ticket:
    """A decoded ticket. Raises PeerProtocolError for what no source of ours hands out."""

    def __init__(self, data: bytes, peer: str) -> None:
        decoded = frames.decode_ticket(data, peer)
        self.key, self.secret = decoded.key, decoded.secret
        name, pid = decoded.fields.get("socket"), decoded.fields.get("pid")
        gpus = decoded.fields.get("gpus")
        if (
            not isinstance(name, str)
            or not 0 < len(name) <= 100
            or type(pid) is not int
            or not 0 < pid < 1 << 31
            or not isinstance(gpus, list)
            or not all(isinstance(uuid, str) for uuid in gpus)
        ):
            raise PeerProtocolError(f"{peer} handed out a ticket that can't be read", peer=peer)
        self.name, self.pid, self.gpus = name, pid, frozenset(gpus)
        self.start_ticks = decoded.fields.get("start_ticks")

    @property
    def is_own(self) -> bool:
        """Is the source this very process?"""
        return self.pid == os.getpid() and self.start_ticks == vm.start_ticks(self.pid)


class Link:
    """Made by `connect`, which raises SourceError; then `map` what it brought."""

    def __init__(self, path: str, magic: bytes, peer: str, ticket: Ticket) -> None:
        self.path, self.peer, self.ticket = path, peer, ticket
        self._magic = magic
        self._lock = threading.Lock()
        self._holders = 1
        self._stream: Stream | None = None
        self._pidfd = -1
        self._control: mmap.mmap | None = None
        self._descriptors: list[int] = []
        self._exported: list[int] = []
        self.allocations: list[Allocation] = []
        self.regions: dict[int, Region] = {}
        self.maps: Maps | None = None

    # --- connecting

    def connect(self, timeout_s: float) -> None:
        """Knock, and take what the source hands out. Whoever fails drops the link."""
        peer = self.peer
        try:
            self._greet(timeout_s)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{peer} does not answer: {error}", peer=peer) from error
        except OSError as error:
            raise PeerLostError(
                f"{peer} can't be reached by {self.path}: {error.strerror or error}", peer=peer
            ) from error
        except ValueError as error:
            raise self._wrong(f"its greeting is malformed: {error}") from error

    def _greet(self, timeout_s: float) -> None:
        # Opened before the connection proves who listens: whatever is read by pid later comes
        # from this very process, as long as the pidfd says that it lives.
        self._pidfd = os.pidfd_open(self.ticket.pid)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(b"\0" + self.ticket.name.encode())
            self._stream = stream = Stream(sock, timeout_s)
        except BaseException:
            sock.close()
            raise
        pid, uid, _ = peer_credentials(sock)
        if (pid, uid) != (self.ticket.pid, os.geteuid()):
            raise self._wrong(f"process {pid} of uid {uid} listens in its place")
        stream.send_all([frames.PREAMBLE.pack(self._magic, self.ticket.key, self.ticket.secret)])
        hello = memoryview(bytearray(frames.HELLO.size))
        stream.fill(hello)
        magic, status = frames.HELLO.unpack(hello)
        if magic != self._magic:
            raise self._wrong(f"it does not speak mx's {self.path}")
        if status != frames.OK:
            text = frames.STATUS_TEXT.get(status, f"refused ({status})")
            raise PeerRefusedError(f"{self.peer}: {text}", peer=self.peer)
        self._receive_greeting(stream)
        if vm.start_ticks(self.ticket.pid) != self.ticket.start_ticks:
            raise self._gone()

    def _receive_greeting(self, stream: Stream) -> None:
        sizes = memoryview(bytearray(wire.GREETING.size))
        control = self._receive(stream, sizes, 1)
        allocations, regions = wire.GREETING.unpack(sizes)
        if len(control) != 1 or max(allocations, regions) > wire.MAX_ENTRIES:
            raise self._wrong("its greeting is malformed")
        if (
            not vm.seals(control[0]) & vm.F_SEAL_SHRINK
            or os.fstat(control[0]).st_size != CONTROL_BYTES
        ):
            raise self._wrong("its control page is not sealed")
        self._control = mmap.mmap(control[0], CONTROL_BYTES, prot=mmap.PROT_READ)
        for first in range(0, allocations, wire.BATCH):
            batch = min(wire.BATCH, allocations - first)
            view = memoryview(bytearray(wire.ALLOCATION.size * batch))
            self._exported += self._receive(stream, view, batch)
            found = [Allocation.unpack(item) for item in wire.ALLOCATION.iter_unpack(view)]
            self.allocations += found
        if len(self._exported) != sum(a.export is wire.Export.FD for a in self.allocations):
            raise self._wrong("descriptors of its memory are missing")
        if not {found.uuid for found in self.allocations} <= self.ticket.gpus:
            raise self._wrong("its memory is on other GPUs than its ticket says")
        for first in range(0, regions, wire.BATCH):
            batch = min(wire.BATCH, regions - first)
            view = memoryview(bytearray(wire.REGION.size * batch))
            descriptors = self._receive(stream, view, batch)
            for index, address, nbytes, where in wire.REGION.iter_unpack(view):
                if index in self.regions or (where == Where.MEMFD and not descriptors):
                    raise self._wrong("its list of regions is malformed")
                descriptor = descriptors.pop(0) if where == Where.MEMFD else -1
                self.regions[index] = Region(index, address, nbytes, Where(where), descriptor)

    def _receive(self, stream: Stream, view: memoryview, at_most: int) -> list[int]:
        descriptors = stream.fill_descriptors(view, at_most)
        self._descriptors.extend(descriptors)
        return descriptors

    def map(self, maps: Maps) -> None:
        """Map all allocations; takes `maps` over. Raises PathError, PeerProtocolError."""
        self.maps = maps
        with translated(self.path, self.peer):
            maps.map(self.allocations, self._exported, own=self.ticket.is_own)
        for region in self.regions.values():
            if region.where is Where.DEVICE and region.nbytes:
                maps.check(region.address, region.nbytes)
        # The maps keep the memory; the descriptors did their duty.
        self._descriptors = [d for d in self._descriptors if d not in self._exported]
        exported, self._exported = self._exported, []
        for descriptor in exported:
            os.close(descriptor)

    # --- while it is open

    @property
    def region_sizes(self) -> Sequence[int]:
        last = max(self.regions, default=-1)
        return [
            self.regions[index].nbytes if index in self.regions else 0 for index in range(last + 1)
        ]

    def register(self, poll: select.poll) -> None:
        """What `poll` then tells of is the source's end, or the grant's."""
        assert self._stream is not None
        poll.register(self._stream.fileno(), select.POLLIN | select.POLLRDHUP)
        poll.register(self._pidfd, select.POLLIN)

    def check(self, poll: select.poll, generation: int) -> None:
        """Raises SourceError where what was read just now must not be believed."""
        self.check_grant(generation)
        if poll.poll(0):
            raise self._gone()

    def check_grant(self, generation: int) -> None:
        """Raises SourceError where the grant has ended or the memory has changed."""
        peer = self.peer
        assert self._control is not None
        now, ended = CONTROL.unpack_from(self._control)
        if ended:
            raise PeerRefusedError(f"{peer}: {frames.STATUS_TEXT[frames.REFUSED]}", peer=peer)
        if now != generation:
            raise StaleGenerationError(f"{peer}: {frames.STATUS_TEXT[frames.STALE]}", peer=peer)

    def tell(self, byte: bytes) -> None:
        """Tell the source, if it listens."""
        assert self._stream is not None
        self._stream.notify(byte)

    def say(self, byte: bytes) -> None:
        """Tell the source for certain. Raises PeerLostError where it is gone."""
        assert self._stream is not None
        try:
            self._stream.send_all([byte])
        except OSError as error:
            raise self._gone() from error

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        # Unmapped first: the connection's end says that it is.
        try:
            if self.maps is not None:
                # Where CUDA has broken there is nothing left to unmap.
                with contextlib.suppress(CudaError):
                    self.maps.close()
        finally:
            if self._control is not None:
                self._control.close()
            for descriptor in (*self._descriptors, self._pidfd):
                if descriptor >= 0:
                    os.close(descriptor)
            if self._stream is not None:
                self._stream.close()

    def _wrong(self, what: str) -> PeerProtocolError:
        return PeerProtocolError(f"{self.peer}: {what}", peer=self.peer)

    def _gone(self) -> PeerLostError:
        return PeerLostError(f"{self.peer}: the source's process is gone", peer=self.peer)
