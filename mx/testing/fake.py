"""A transport within one process that keeps every rule, plainly. Broken ones derive from it.

Its source can be killed and stopped without a process: see FakeHarness.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import pathlib
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

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
from mx.testing.certificates import PRINCIPAL
from mx.testing.child import GRANT_ID
from mx.testing.harness import GENERATION, Harness
from mx.testing.memory import Memory
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Rail,
    Read,
    Session,
    Span,
    TlsFiles,
    Transport,
    Unavailable,
    Viable,
    View,
    host_view,
    spans_of,
)
from mx.units import KIB, MIB

STEP_BYTES = 256 * KIB


class FakeExposure:
    """Regions of this process for sessions of this process. See `mx.transport.Exposure`."""

    def __init__(
        self,
        transport: FakeTransport,
        regions: Sequence[ExposedRegion],
        options: ExposeOptions,
    ) -> None:
        self.transport = transport
        self.hosts = options.hosts
        self.tls = options.tls
        self.limiter = options.limiter
        self.content = options.content
        self.block_digests = bytes(options.block_digests or b"")
        self.has_generation = False
        self.sent: Counter[str] = Counter()
        self.sent_nbytes = 0
        self.stops = 0
        self.regions = {region.index: region for region in regions}
        self.lock = threading.Lock()
        self.generation = 0
        self.closed = False
        self.killed = False
        self.running = threading.Event()
        self.running.set()
        self.busy: Counter[str] = Counter()
        self.secrets: dict[str, str] = {}
        self.principals: dict[str, str] = {}

    def grant(self, grant_id: str) -> bytes:
        with self.lock:
            if self.closed:
                raise ClosedError("the exposure is closed; no more grants")
            self.secrets[grant_id] = secret = secrets.token_hex(16)
        return json.dumps({"exposure": id(self), "grant": grant_id, "secret": secret}).encode()

    def bind(self, grant_id: str, principal: str) -> None:
        self.principals[grant_id] = principal

    def revoke(self, grant_id: str) -> None:
        with self.lock:
            self.secrets.pop(grant_id, None)
            self.sent.pop(grant_id, None)

    def set_generation(self, generation: int) -> None:
        with self.lock:
            if self.has_generation and generation != self.generation:
                self.withdraw_content()
            self.generation, self.has_generation = generation, True

    def withdraw_content(self) -> None:
        self.content = self.block_digests = b""

    def active_readers(self) -> int:
        with self.lock:
            return sum(1 for count in self.busy.values() if count)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.secrets.clear()
            self.regions.clear()

    def join(self, timeout_s: float | None = None) -> bool:
        return True

    def sent_bytes(self) -> int:
        return self.sent_nbytes

    def sent_to(self, grant_id: str) -> int:
        return self.sent[grant_id]

    def copy(
        self, grant_id: str, region: int, offset: int, view: memoryview, ended: Callable[[], bool]
    ) -> None:
        """Copy one step's bytes, slice by slice if there is a limiter."""
        if self.limiter is None:
            self.copy_slice(grant_id, region, offset, view)
            return
        size = self.limiter.slice_nbytes(grant_id)
        for start in range(0, len(view), size):
            part = view[start : start + size]
            until_s = time.monotonic() + self.limiter.delay_s(len(part))
            while time.monotonic() < until_s:
                if ended():
                    return
                time.sleep(0.005)
            self.copy_slice(grant_id, region, offset + start, part)

    def copy_slice(self, grant_id: str, region: int, offset: int, view: memoryview) -> None:
        """Copy under the lock: a region is never let go in mid-copy."""
        with self.lock:
            if region in self.regions:
                done = 0
                for part in self.gather(self.regions[region].view[offset : offset + len(view)]):
                    view[done : done + len(part)] = part
                    done += len(part)
                self.sent_nbytes += done
                if grant_id in self.secrets:
                    self.sent[grant_id] += done

    def gather(self, view: View) -> list[memoryview]:
        """Return a view's bytes, in order. Raises PeerRefusedError for a hole."""
        try:
            return [host_view(span) for span in spans_of(view)]
        except LocalError as error:
            raise PeerRefusedError("there is no memory there") from error


class FakeSession:
    """Threads that copy step by step. See `mx.transport.Session`."""

    def __init__(self, grant: Grant, exposure: FakeExposure, grant_id: str, secret: str) -> None:
        self.grant = grant
        self.exposure = exposure
        self.grant_id = grant_id
        self.secret = secret
        # What was stated when the session was opened.
        self.block_digests = exposure.block_digests if grant.content else b""
        self.wake = threading.Condition()
        self.queue: deque[Read] = deque()
        self.closed = False
        self.threads: list[threading.Thread] = []
        self.grow(grant.streams)

    @property
    def open_streams(self) -> int:
        return len(self.threads)

    def grow(self, streams: int) -> None:
        with self.wake:
            for number in range(len(self.threads), 0 if self.closed else streams):
                thread = threading.Thread(target=self.main, name=f"fake-{number}", daemon=True)
                thread.start()
                self.threads.append(thread)
            self.depth = 2 * len(self.threads)

    def read(self, reads: Sequence[Read]) -> None:
        with self.wake:
            if self.closed:
                raise ClosedError("the session is closed")
            self.queue.extend(reads)
            self.wake.notify_all()

    def adopt(self, arena: Span) -> None:
        pass

    def attach(self, region: int) -> memoryview:
        found = self.exposure.regions.get(region)
        if found is None or found.memfd is None or not _sealed(found.memfd):
            raise NotAllowedError(f"{self.grant.peer}: region {region} is not sealed")
        return memoryview(bytearray(host_view(found.view)))

    def vouched_digests(self) -> memoryview | None:
        return memoryview(self.block_digests) if self.block_digests and not self.closed else None

    def close(self) -> None:
        with self.wake:
            self.closed = True
            self.wake.notify_all()

    def join(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    # --- the threads

    def main(self) -> None:
        while (read := self.take()) is not None:
            self.run(read)

    def take(self) -> Read | None:
        with self.wake:
            while not self.queue and not self.closed:
                self.wake.wait()
            return self.queue.popleft() if self.queue else None

    def run(self, read: Read) -> None:
        error: MxError | None = None
        with self.exposure.lock:
            self.exposure.busy[self.grant_id] += 1
        try:
            self.check_bounds(read)
            self.check()
            self.copy(read)
        except MxError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - the sink's, which is reported
            self.report(caught)
            error = LocalError("its sink raised")
        finally:
            with self.exposure.lock:
                self.exposure.busy[self.grant_id] -= 1
        self.end(read, error)

    def end(self, read: Read, error: MxError | None) -> None:
        try:
            if error is None:
                read.sink.done()
            else:
                read.sink.failed(self.name(read, error))
        except Exception as caught:  # noqa: BLE001 - the sink's, which is reported
            self.report(caught)

    def report(self, error: Exception) -> None:
        """Report what a sink raised, as `threading` does where a thread raises."""
        raised = (type(error), error, error.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(raised))

    def name(self, read: Read, error: MxError) -> MxError:
        message = f"{read.tag}: {error.message}"
        if isinstance(error, SourceError):
            return type(error)(message, peer=self.grant.peer)
        return type(error)(message)

    def copy(self, read: Read) -> None:
        landed = 0
        for region, offset, part in self.steps(read):
            self.move(read, region, offset, part)
            landed += len(part)
            self.check()
            read.sink.landed(landed)
        self.check()

    def steps(self, read: Read) -> Iterator[tuple[int, int, memoryview]]:
        """Yield (region, offset there, destination) of each step: one place's bytes at most."""
        for piece in read.pieces:
            at = piece.region_offset
            for span in spans_of(piece.view):
                for start in range(0, len(span), STEP_BYTES):
                    part = host_view(span)[start : start + STEP_BYTES]
                    yield piece.region, at + start, part
                at += len(span)

    def move(self, read: Read, region: int, offset: int, part: memoryview) -> None:
        self.exposure.copy(self.grant_id, region, offset, part, self.ended)
        self.exposure.transport.send(part, self.exposure.tls)

    def ended(self) -> bool:
        """Return True if the read will fail whatever comes."""
        exposure = self.exposure
        return self.closed or exposure.secrets.get(self.grant_id) != self.secret

    def check_bounds(self, read: Read) -> None:
        for piece in read.pieces:
            region = self.exposure.regions.get(piece.region)
            end = piece.region_offset + len(piece.view)
            if region is None or piece.region_offset < 0 or end > len(region.view):
                raise PeerRefusedError(f"{self.grant.peer}: out of range", peer=self.grant.peer)

    def check(self) -> None:
        """Raise MxError where the read must not go on."""
        exposure, peer = self.exposure, self.grant.peer
        waited_s = 0.0
        while not exposure.running.wait(0.01) and not self.closed:
            waited_s += 0.01
            if waited_s >= self.grant.stall_timeout_s:
                raise PeerTimeoutError(f"{peer} does not answer", peer=peer)
        if self.closed:
            raise ClosedError("the session was closed")
        if exposure.killed or exposure.closed:
            raise PeerLostError(f"{peer} is gone", peer=peer)
        if exposure.secrets.get(self.grant_id) != self.secret:
            raise PeerRefusedError(f"{peer} has withdrawn the grant", peer=peer)
        if exposure.generation != self.grant.generation:
            raise StaleGenerationError(f"{peer}: its memory has changed", peer=peer)


def _same(one: str, other: str) -> bool:
    return pathlib.Path(one).read_bytes() == pathlib.Path(other).read_bytes()


class FakeTransport:
    """See `mx.transport.Transport`. Exposures live in the instance that made them."""

    name = "fake"
    exposure_type: type[FakeExposure] = FakeExposure
    session_type: type[FakeSession] = FakeSession

    def __init__(self) -> None:
        self.exposures: dict[int, FakeExposure] = {}
        self.rails: list[Rail] = []
        self.wire: bytearray | None = None  # what goes over the network, while it is looked at

    def probe(self) -> Viable | Unavailable:
        return Viable("in this process")

    def reach(self, here: Place, there: Place) -> Path | None:
        if not here.device == there.device == "cpu":
            return None
        if here.same_host_key == there.same_host_key:
            return Path(self.name, 5.0, attach=True)
        return Path(self.name, 1.0, medium=Medium.NETWORK, trusting=True)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        self.check_trust(options.hosts, options.trusted_fabric)
        exposure = self.exposure_type(self, regions, options)
        self.exposures[id(exposure)] = exposure
        return exposure

    def open(self, grant: Grant) -> Session:
        try:
            ticket = json.loads(grant.ticket)
            exposure = self.exposures[ticket["exposure"]]
            grant_id, secret = str(ticket["grant"]), str(ticket["secret"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"{grant.peer} handed out a ticket that can't be read"
            raise PeerProtocolError(message, peer=grant.peer) from error
        expected = exposure.secrets.get(grant_id, "")
        if not self.admits(expected, secret):
            raise PeerRefusedError(f"{grant.peer}: wrong secret", peer=grant.peer)
        tls = exposure.tls, grant.tls
        if not (self.admits_reader(*tls) and self.trusts_source(*tls)):
            raise PeerRefusedError(f"{grant.peer}: the certificates do not fit", peer=grant.peer)
        if grant.tls is not None and not self.is_at(grant.peer):
            raise PeerRefusedError(f"{grant.peer}: the certificate names others", peer=grant.peer)
        if exposure.tls is not None and not self.is_of(exposure.principals.get(grant_id, "")):
            raise PeerRefusedError(f"{grant.peer}: another's grant", peer=grant.peer)
        self.check_trust(exposure.hosts, grant.trusted_fabric)
        if grant.rail is not None and grant.rail.remote_address not in exposure.hosts:
            raise PeerProtocolError(f"{grant.peer} does not listen there", peer=grant.peer)
        if grant.rail is not None:
            self.rails.append(grant.rail)
        if grant.content and not self.holds(exposure, grant):
            message = f"{grant.peer} serves other weights than those that were asked for"
            raise PeerProtocolError(message, peer=grant.peer)
        return self.session_type(grant, exposure, grant_id, expected)

    def admits_reader(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        """Return True if a source with TLS accepts a reader's certificate: that of its authority,
        which has only the one."""
        return source is None or (
            reader is not None and _same(reader.certificate, source.authority)
        )

    def trusts_source(self, source: TlsFiles | None, reader: TlsFiles | None) -> bool:
        """Return True if a reader with TLS accepts a source's certificate."""
        return reader is None or (
            source is not None and _same(source.certificate, reader.authority)
        )

    def is_at(self, peer: str) -> bool:
        """Return True if the source's certificate, one of the suite's, names an endpoint's host."""
        return peer.startswith(f"{PRINCIPAL}:")

    def is_of(self, principal: str) -> bool:
        """Return True if the reader's certificate, one of the suite's, names a principal; "": any
        does."""
        return principal in ("", PRINCIPAL)

    def send(self, data: memoryview, tls: TlsFiles | None) -> None:
        """Have bytes go over the network, with TLS files as if they were encrypted."""
        if self.wire is not None:
            self.wire += data if tls is None else bytes(len(data))

    def check_trust(self, hosts: Sequence[str], trusted: bool) -> None:
        """Raise NotAllowedError for a host beyond loopback that is not trusted."""
        if not trusted and not all(host.startswith("127.") for host in hosts):
            raise NotAllowedError("the fake enforces no bounds: say `trusted_fabric`")

    def holds(self, exposure: FakeExposure, grant: Grant) -> bool:
        """Return True if an exposure says that it holds what the grant is for."""
        return (exposure.content, exposure.generation) == (grant.content, grant.generation)

    def admits(self, expected: str, secret: str) -> bool:
        return bool(expected) and hmac.compare_digest(expected.encode(), secret.encode())


class FakeRemote:
    """A FakeExposure that can be killed and stopped as if it were another process."""

    def __init__(self, transport: FakeTransport, sizes: Sequence[int], seed: int) -> None:
        self._memories = [Memory(size, seed + index) for index, size in enumerate(sizes)]
        regions = [memory.region(index) for index, memory in enumerate(self._memories)]
        exposure = transport.expose(regions, ExposeOptions())
        assert isinstance(exposure, FakeExposure)
        self._exposure = exposure
        self._exposure.set_generation(GENERATION)
        self.ticket = self._exposure.grant(GRANT_ID)

    def kill(self) -> None:
        self._exposure.killed = True

    def stop(self) -> None:
        self._exposure.stops += 1
        self._exposure.running.clear()

    def resume(self) -> None:
        self._exposure.running.set()

    def close(self) -> None:
        self._exposure.close()
        self.resume()
        for memory in self._memories:
            # Broken fakes may hold on to views; the rule about what is left says so.
            with contextlib.suppress(BufferError):
                memory.close()


class FakeHarness(Harness):
    """The harness for FakeTransport and what derives from it: `make` is called for each rule."""

    def __init__(
        self, make: Callable[[], FakeTransport] = FakeTransport, *, deadline_s: float = 30.0
    ) -> None:
        super().__init__("", big_nbytes=2 * MIB, stall_timeout_s=0.25, deadline_s=deadline_s)
        self._make = make
        self._made: FakeTransport | None = None

    def transport(self) -> Transport:
        self._made = self._make()
        return self._made

    @contextlib.contextmanager
    def tapped(self, ticket: bytes) -> Iterator[tuple[bytes, bytearray]]:
        assert self._made is not None
        self._made.wire = kept = bytearray()
        try:
            yield ticket, kept
        finally:
            self._made.wire = None

    def uses(self, rail: Rail, session: Session) -> bool:
        return self._made is not None and rail in self._made.rails

    def remote(self, transport: Transport, sizes: Sequence[int], seed: int) -> FakeRemote:
        assert isinstance(transport, FakeTransport)
        return FakeRemote(transport, sizes, seed)


def _sealed(memfd: int) -> bool:
    wanted = 0x2 | 0x4 | 0x8  # SHRINK, GROW, WRITE
    return fcntl.fcntl(memfd, 1034) & wanted == wanted  # F_GET_SEALS
