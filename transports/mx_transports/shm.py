"""The `shm` transport: between processes of one uid on one kernel, without any copy in between.

Sealed memfds are attached, or copied by preadv straight from the memfd into the destination;
other memory is copied by process_vm_readv. Measured on two cores of a virtual machine, 512 MiB,
hashing each MiB as it lands, as a ratio of one thread's memcpy from a fresh map of the memfd
without hashing (fresh destinations: populate included; medians of five):

| way, threads                      | fresh, 1 | fresh, 2 | warm, 1 | warm, 2 |
|-----------------------------------|----------|----------|---------|---------|
| preadv from the memfd             | 0.99     | 1.31     | 0.87    | 1.43    |
| process_vm_readv from the memfd   | 0.80     | 1.16     | 0.70    | 1.18    |
| process_vm_readv, anonymous       | 1.02     | 1.35     | 0.92    | 1.53    |
| map the memfd, memcpy             | 0.71     | 1.02     | 0.64    | 0.94    |

So a memfd is read by preadv: the fastest, in need of no permission to read another process, and
where the source breaks its word about the size, a short read instead of a SIGBUS.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from mx.core.topology import Place
from mx.errors import (
    ClosedError,
    LocalError,
    MxError,
    NotAllowedError,
    PeerLostError,
    PeerProtocolError,
    PeerRefusedError,
    PeerTimeoutError,
    SourceError,
    StaleGenerationError,
)
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Path,
    Read,
    Session,
    Unavailable,
    Viable,
)
from mx.units import MIB
from mx_transports import _frames as frames
from mx_transports import _vm as vm
from mx_transports._control import CONTROL, CONTROL_BYTES, peer_credentials
from mx_transports._lanes import LaneSession, Part, steps
from mx_transports._shm_source import (
    BATCH,
    BUSY,
    ENTRY,
    IDLE,
    INFO,
    MAGIC,
    MAX_REGIONS,
    ShmExposure,
)
from mx_transports._stream import Stream

#: 1, 2 and 4 MiB were tried: 2 was a tenth faster than 1, and no slower than 4.
STEP_BYTES = 2 * MIB
#: The same on every architecture that torch has wheels for; Python names it from 3.12 on.
_MAP_NORESERVE = 0x4000


class ShmTransport:
    """See `mx.transport.Transport`. Paths can be attached to."""

    name = "shm"

    def probe(self) -> Viable | Unavailable:
        if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
            return Unavailable("shm needs Linux 5.3 or later (memfd_create, pidfd_open)")
        if not vm.can_read_processes():
            return Unavailable("shm needs a C library with process_vm_readv")
        return Viable("memfd, process_vm_readv")

    def reach(self, here: Place, there: Place) -> Path | None:
        """Same kernel, same network, process and user namespaces, same uid."""
        if here.device != "cpu" or there.device != "cpu" or not here.boot_id or here.uid < 0:
            return None
        if here.same_host_key != there.same_host_key:
            return None
        if (here.uid, here.user_namespace) != (there.uid, there.user_namespace):
            return None
        return Path(self.name, 6.0, attach=True)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Hosts and TLS of the options do not matter here. Raises LocalError."""
        return ShmExposure(regions, options)

    def open(self, grant: Grant) -> Session:
        """Raises SourceError; LocalError where this process is out of descriptors."""
        ticket = frames.decode_ticket(grant.ticket, grant.peer)
        name, pid = ticket.fields.get("socket"), ticket.fields.get("pid")
        ticks = ticket.fields.get("start_ticks")
        if not isinstance(name, str) or type(pid) is not int or pid <= 0 or len(name) > 100:
            raise PeerProtocolError(
                f"{grant.peer} handed out a ticket that can't be read", peer=grant.peer
            )
        source = _Source(grant.peer, pid)
        try:
            source.connect(name, ticket, grant.stall_timeout_s)
            if vm.start_ticks(pid) != ticks:
                raise PeerLostError(f"{grant.peer}: the source's process is gone", peer=grant.peer)
            source.try_memory()
        except BaseException as error:
            source.close()
            if isinstance(error, TimeoutError):
                raise PeerTimeoutError(
                    f"{grant.peer} does not answer: {error}", peer=grant.peer
                ) from error
            if isinstance(error, OSError):
                raise PeerLostError(
                    f"{grant.peer} can't be reached by shm: {error.strerror or error}",
                    peer=grant.peer,
                ) from error
            raise
        return ShmSession(grant, source)


@dataclass(frozen=True, slots=True)
class _Region:
    nbytes: int
    address: int
    descriptor: int | None


class _Source:
    """What a reader holds of its source: connection, control page, descriptors, pidfd."""

    def __init__(self, peer: str, pid: int) -> None:
        self.peer = peer
        self.pid = pid
        self.stream: Stream | None = None
        self.pidfd = -1
        self.control: mmap.mmap | None = None
        self.regions: dict[int, _Region] = {}
        self._descriptors: list[int] = []

    def connect(self, name: str, ticket: frames.Ticket, timeout_s: float) -> None:
        # Opened before the connection proves who listens: whatever is read by pid later comes
        # from this very process, as long as the pidfd says that it lives.
        self.pidfd = os.pidfd_open(self.pid)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(b"\0" + name.encode())
            self.stream = stream = Stream(sock, timeout_s)
        except BaseException:
            sock.close()
            raise
        pid, uid, _ = peer_credentials(sock)
        if (pid, uid) != (self.pid, os.geteuid()):
            raise self._wrong(f"process {pid} of uid {uid} listens in its place")
        stream.send_all([frames.PREAMBLE.pack(MAGIC, ticket.key, ticket.secret)])
        hello = memoryview(bytearray(frames.HELLO.size))
        stream.fill(hello)
        magic, status = frames.HELLO.unpack(hello)
        if magic != MAGIC:
            raise self._wrong("it does not speak mx's shm")
        if status != frames.OK:
            text = frames.STATUS_TEXT.get(status, f"refused ({status})")
            raise PeerRefusedError(f"{self.peer}: {text}", peer=self.peer)
        self._receive_regions(stream)

    def _receive_regions(self, stream: Stream) -> None:
        info = memoryview(bytearray(INFO.size))
        control = self._receive(stream, info, 1)
        (count,) = INFO.unpack(info)
        if len(control) != 1 or count > MAX_REGIONS:
            raise self._wrong("its greeting is malformed")
        if (
            not vm.seals(control[0]) & vm.F_SEAL_SHRINK
            or os.fstat(control[0]).st_size != CONTROL_BYTES
        ):
            raise self._wrong("its control page is not sealed")
        self.control = mmap.mmap(control[0], CONTROL_BYTES, prot=mmap.PROT_READ)
        while len(self.regions) < count:
            batch = min(BATCH, count - len(self.regions))
            entries = memoryview(bytearray(ENTRY.size * batch))
            descriptors = self._receive(stream, entries, batch)
            for index, nbytes, address, attached in ENTRY.iter_unpack(entries):
                if index in self.regions or (attached and not descriptors):
                    raise self._wrong("its list of regions is malformed")
                descriptor = descriptors.pop(0) if attached else None
                self.regions[index] = _Region(nbytes, address, descriptor)

    def _receive(self, stream: Stream, view: memoryview, at_most: int) -> list[int]:
        descriptors = stream.fill_descriptors(view, at_most)
        self._descriptors.extend(descriptors)
        return descriptors

    def try_memory(self) -> None:
        """Find out now, not at the first read, whether the kernel allows process_vm_readv."""
        for region in self.regions.values():
            if region.descriptor is None and region.nbytes:
                view = memoryview(bytearray(1))
                vm.read_process(self.pid, [(region.address, view)], self.peer)
                return

    def _wrong(self, what: str) -> PeerProtocolError:
        return PeerProtocolError(f"{self.peer}: {what}", peer=self.peer)

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        if self.control is not None:
            self.control.close()
        for descriptor in (*self._descriptors, self.pidfd):
            if descriptor >= 0:
                os.close(descriptor)


class ShmSession(LaneSession):
    """Lanes that copy by system calls; the source's process has no part in a read."""

    def __init__(self, grant: Grant, source: _Source) -> None:
        lanes = max(1, grant.streams)
        super().__init__("mx-shm", grant, lanes)
        self.depth = 2 * lanes
        self._source = source
        self._busy = 0
        self._busy_lock = threading.Lock()
        last = max(source.regions, default=-1)
        self._sizes = [
            source.regions[index].nbytes if index in source.regions else 0
            for index in range(last + 1)
        ]
        self._start()

    def attach(self, region: int) -> memoryview:
        with self._wake:
            if self._closed:
                raise ClosedError(f"the session with {self._peer} is closed")
            found = self._source.regions.get(region)
            descriptor = found.descriptor if found is not None else None
            if found is None or descriptor is None:
                raise NotAllowedError(
                    f"{self._peer}: region {region} is not in a sealed memfd: it can be copied, "
                    "not attached"
                )
            if vm.seals(descriptor) & vm.FULL_SEALS != vm.FULL_SEALS:
                raise NotAllowedError(f"{self._peer}: region {region} is not fully sealed")
            if os.fstat(descriptor).st_size != found.nbytes or not found.nbytes:
                raise NotAllowedError(
                    f"{self._peer}: region {region} is not as large as the source says"
                )
            try:
                # Private: a page that is written to becomes this process's own. No swap or
                # overcommit is reserved for pages that nobody writes to.
                mapped = mmap.mmap(
                    descriptor,
                    found.nbytes,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            except OSError as error:
                raise LocalError(f"can't map {found.nbytes} bytes: {error.strerror}") from error
            return memoryview(mapped)

    def _abort(self) -> None:
        pass  # Lanes look at `_closed` after each step; none blocks on the peer.

    def _release(self) -> None:
        self._source.close()

    def _carry(self, lane: int) -> None:
        poll = select.poll()
        assert self._source.stream is not None
        poll.register(self._source.stream.fileno(), select.POLLIN | select.POLLRDHUP)
        poll.register(self._source.pidfd, select.POLLIN)
        busy = False
        try:
            while True:
                read = self._take(wait=False)
                if read is None:
                    # The source is told at the end of a run of reads, not between them.
                    busy = self._say_busy(busy, False)
                    read = self._take(wait=True)
                if read is None:
                    return
                busy = self._say_busy(busy, True)
                self._complete(read, poll)
        finally:
            self._say_busy(busy, False)

    def _complete(self, read: Read, poll: select.poll) -> None:
        """Raises PeerLostError, having failed the read, where no other can succeed."""
        failure: MxError | None = PeerLostError(f"{self._peer}: abandoned", peer=self._peer)
        try:
            self._copy(read, poll)
            failure = None
        except SourceError as error:
            failure = error
            if isinstance(error, PeerLostError):
                raise
        finally:
            if failure is not None:
                self._fail(read, failure)
        if failure is None:
            read.sink.done()

    def _copy(self, read: Read, poll: select.poll) -> None:
        self._check_bounds(read, self._sizes)
        self._check_source(poll)
        for parts, landed in steps(read, STEP_BYTES):
            self._move(parts)
            # After the bytes: what was read is good only if nothing had changed by then.
            self._check_source(poll)
            read.sink.landed(landed)

    def _move(self, parts: Sequence[Part]) -> None:
        remote: list[tuple[int, memoryview]] = []
        for part in parts:
            region = self._source.regions[part.region]
            if region.descriptor is None:
                remote.append((region.address + part.offset, part.view))
                continue
            done = 0
            while done < len(part.view):
                got = os.preadv(region.descriptor, [part.view[done:]], part.offset + done)
                if not got:
                    raise PeerProtocolError(
                        f"{self._peer}: its memfd is shorter than it said", peer=self._peer
                    )
                done += got
        if remote:
            vm.read_process(self._source.pid, remote, self._peer)

    def _check_source(self, poll: select.poll) -> None:
        assert self._source.control is not None
        generation, ended = CONTROL.unpack_from(self._source.control)
        if self._closed:
            raise PeerLostError("closed", peer=self._peer)
        if ended:
            text = frames.STATUS_TEXT[frames.REFUSED]
            raise PeerRefusedError(f"{self._peer}: {text}", peer=self._peer)
        if generation != self._grant.generation:
            text = frames.STATUS_TEXT[frames.STALE]
            raise StaleGenerationError(f"{self._peer}: {text}", peer=self._peer)
        if poll.poll(0):
            raise PeerLostError(f"{self._peer}: the source's process is gone", peer=self._peer)

    def _say_busy(self, before: bool, now: bool) -> bool:
        """Change what this lane adds to the session's being busy; tells the source if it must."""
        if before == now:
            return now
        assert self._source.stream is not None
        with self._busy_lock:
            self._busy += 1 if now else -1
            # The first lane to begin, or the last to end.
            if self._busy == now:
                self._source.stream.notify(BUSY if now else IDLE)
        return now
