"""The contract between mx and whatever moves bytes.

A transport is found by the entry-point group `mx.transports` (a callable without arguments that
returns a `Transport`), and its module is imported at the first use. The suite in
`mx.testing.conformance`, not this text, defines what one must do; third parties run it on theirs.
docs/transports.md builds two with `mx_transports.toolkit`.

The source side *exposes* regions and hands out a *ticket* per granted reader; the target side
*opens* a ticket and *reads*. A session completes each read by itself, from threads of its own:
the sink gets `landed` while bytes arrive, then exactly one of `done` and `failed`. After that
the transport never touches the destination again: a read is reported as failed only when nothing
can write there any more (a thread has returned, a DMA was waited for, an agent is destroyed), also
where the session was closed or the connection cut. `close()` aborts what is outstanding (each
fails with `ClosedError`); `join()` returns True once no thread, task, descriptor, mapping or DMA
of the session is left. Destinations stay valid until then: that is the caller's duty.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from mx.core.paths import FIRST_STREAMS, Medium, Path, Rail
from mx.core.topology import Place
from mx.errors import MxError, release_frames
from mx.views import DeviceView, ScatteredView, Span, View, contiguous, host_view, spans_of

__all__ = [
    "BLOCK_DIGEST_BYTES",
    "MAX_CONTENT_BYTES",
    "AdoptsPlaces",
    "Authenticating",
    "Cancellation",
    "Compressing",
    "DeviceHashing",
    "DeviceView",
    "ExposeOptions",
    "ExposedRegion",
    "Exposure",
    "Grant",
    "Growing",
    "Limiter",
    "Medium",
    "Path",
    "Piece",
    "Rail",
    "Read",
    "ReportedErrors",
    "ScatteredView",
    "Sending",
    "Session",
    "Sink",
    "Span",
    "TlsFiles",
    "Transport",
    "Unavailable",
    "Viable",
    "View",
    "Vouching",
    "Witness",
    "contiguous",
    "host_view",
    "spans_of",
]


#: The longest `ExposeOptions.content`.
MAX_CONTENT_BYTES = 64
#: The size of a digest of `ExposeOptions.block_digests`: xxh3_128.
BLOCK_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Viable:
    """The transport can work in this process. `detail` is for people."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """It can't; `reason` says why and, if anything can, what would change that."""

    reason: str


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of mutual TLS: this process's certificate and key, the CA of its peers, and the
    lists of certificates that this has revoked; "" for none. `connection_age_s` is the largest age
    of a connection that others have made; 0.0 for none."""

    certificate: str
    key: str
    authority: str
    revocations: str = ""
    connection_age_s: float = field(default=0.0, kw_only=True)

    def state(self) -> tuple[object, ...]:
        """Return what changes when a file is replaced: a process uses the same ones many times."""
        return tuple(map(_state, (self.certificate, self.key, self.authority, self.revocations)))


def _state(path: str) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@dataclass(frozen=True, slots=True)
class ExposedRegion:
    """Memory that a source serves.

    `view` is a read-only byte view of it, or its place on a device, valid until the exposure was
    joined; `address` its first byte's address in this process. `memfd` is the descriptor of a
    sealed memfd that holds exactly this region from its offset 0, or None; the exposure may send
    duplicates of it but never closes it.

    A scattered view is memory that another program laid out, and may change (`address` is 0 and
    there is no memfd). Readers name places by their offsets in the view all the same. A transport
    that can't gather bytes from several places refuses such a region.
    """

    index: int
    view: View
    address: int
    device: str = "cpu"
    memfd: int | None = None


class Limiter(Protocol):
    """How fast a process may send, over all its transports and readers. Thread-safe."""

    def slice_nbytes(self, grant_id: str) -> int:
        """Return how many bytes may be sent in one go on a grant, so that readers take turns. The
        grant's streams share them."""

    def delay_s(self, nbytes: int) -> float:
        """Take bytes of what may be sent.

        Args:
            nbytes: How many, a slice at most.

        Returns:
            How many seconds to wait, holding no lock, before they are sent.
        """


@dataclass(frozen=True, slots=True)
class ExposeOptions:
    """How to listen.

    Attributes:
        hosts: The addresses for data endpoints; a port is chosen for each.
        tls: The files for mutual TLS, None for plain connections.
        stall_timeout_s: After so many seconds without progress a connection is dropped.
        place: This process's, with its interfaces.
        trusted_fabric: Every process that reaches `hosts` is trusted. A transport that enforces no
            bounds (whose paths are `trusting`) exposes nothing beyond loopback without it.
        limiter: What a `Sending` exposure takes bytes from before it sends them; None for no limit.
        ports: The ports to choose from; empty for any.
        at_peer: Readers reach the data endpoints at the host that they dial for control, whatever
            the addresses are here (address translation, containers).
        content: Which weights, in which layout, the regions hold, as an opaque label of at most
            MAX_CONTENT_BYTES; empty for none. See `Grant.content`. Memory that does not hold all of
            them yet must have no label: readers may attach to what has one.
        background: Whether this process has work of its own that comes first: then the threads that
            serve readers run at low priority.
        on_lost: Called on any thread, once or more, with the error for which a region's memory will
            never be read any more, as on a lost GPU; it does not block.
        block_digests: The xxh3_128 of each of the weights' blocks in their order, which this
            process computed or checked itself; None or empty for none. See `Vouching`.
        setting: Returns the value of a setting by its name, also of one that a pack adds.

    Label and digests are of the first generation that the exposure is given. Once it is given
    another, no reader gets them any more.

    Raises:
        ValueError: The label is too long, or the digests are not whole or not contiguous.
    """

    hosts: tuple[str, ...] = ("127.0.0.1",)
    tls: TlsFiles | None = None
    stall_timeout_s: float = 5.0
    place: Place = field(default_factory=Place)
    trusted_fabric: bool = False
    limiter: Limiter | None = None
    ports: range = range(0)
    at_peer: bool = False
    content: bytes = b""
    background: bool = False
    block_digests: bytes | memoryview | None = field(default=None, repr=False)
    setting: Callable[[str], Any] = field(default=dict[str, Any]().__getitem__, repr=False)
    on_lost: Callable[[MxError], None] = field(default=lambda _: None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.content) > MAX_CONTENT_BYTES:
            raise ValueError(f"a content label has {MAX_CONTENT_BYTES} bytes at most")
        digests = memoryview(self.block_digests or b"")
        if not digests.c_contiguous or digests.nbytes % BLOCK_DIGEST_BYTES:
            raise ValueError(f"block digests are {BLOCK_DIGEST_BYTES} contiguous bytes each")


@runtime_checkable
class Exposure(Protocol):
    """The source side of a transport. All methods are thread-safe and do not block on peers."""

    def grant(self, grant_id: str) -> bytes:
        """Return a ticket for one reader: opaque, with its secret, not to be logged.

        Raises:
            ClosedError: The exposure is closed.
        """

    def revoke(self, grant_id: str) -> None:
        """Withdraw a ticket: running reads fail, new ones are refused. Unknown ids are ignored."""

    def set_generation(self, generation: int) -> None:
        """Refuse reads that name another generation from now on; those that run fail.

        The options' label and digests are withdrawn if another generation was set before.
        """

    def active_readers(self) -> int:
        """Return the number of grants that have a read running right now (for draining)."""

    def close(self) -> None:
        """Stop serving. Idempotent."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left: no thread, socket, descriptor or view of a region.

        Args:
            timeout_s: How long to wait at most, None for ever.

        Returns:
            False if the time passed first. Never True while something is still to go.
        """


@runtime_checkable
class Authenticating(Protocol):
    """An exposure that, with TLS, knows its readers by the certificates that they show."""

    def bind(self, grant_id: str, principal: str) -> None:
        """Let in on a grant only connections whose certificate names this principal, as
        `mx.core.policy.subject_of` finds it. Called before the ticket is handed out."""


@runtime_checkable
class Sending(Protocol):
    """An exposure that sends the bytes itself, in place of letting readers fetch them: it counts
    what it sends, and keeps to the options' limiter."""

    def sent_bytes(self) -> int:
        """Return the payload bytes sent so far, to all readers. Thread-safe."""

    def sent_to(self, grant_id: str) -> int:
        """Return the payload bytes sent on this grant so far, those of running reads counted at
        least once a second; 0 once it was revoked. Thread-safe."""


@runtime_checkable
class Compressing(Protocol):
    """A `Sending` exposure that may send fewer bytes than its readers get. `sent_bytes`, `sent_to`
    and what it takes from the limiter count those that it sends."""

    def delivered_to(self, grant_id: str) -> int:
        """Return the bytes of regions that were sent on this grant so far, as many as readers get;
        0 once it was revoked. Thread-safe."""


@runtime_checkable
class Witness(Protocol):
    """An exposure that knows which grants are used. A reader's reported bytes count only on grants
    that it has connected with."""

    def used(self) -> Mapping[str, int]:
        """Return the payload bytes sent so far on each grant whose ticket was used to connect; 0
        where readers fetch. Thread-safe."""


@dataclass(slots=True, eq=False)
class Cancellation:
    """Ends an `open` that is under way: it shuts down the sockets that are waited for."""

    is_set: bool = False
    sockets: list[socket.socket] = field(default_factory=list, repr=False)

    def covers(self, sock: socket.socket) -> None:
        """Shut the socket down when this is set, or now if it is: then nothing waits for it."""
        self.sockets.append(sock)
        if self.is_set:
            self.set()

    def set(self) -> None:
        """Shut down all sockets that this covers; from any thread."""
        self.is_set = True
        for sock in list(self.sockets):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # TLS's own would change its state


@dataclass(frozen=True, slots=True)
class Grant:
    """What `open` needs.

    Attributes:
        grant_id: What the source calls the grant.
        ticket: What `Exposure.grant` returned for it.
        generation: The source's generation that reads are planned on.
        region_nbytes: The sizes of the source's regions in bytes, by index.
        peer: The source's control endpoint, which names it in errors.
        tls: The files for mutual TLS, None for plain connections. The source's certificate has to
            name the host of `peer`.
        stall_timeout_s: After so many seconds without progress a read fails.
        streams: How many connections to open, where a transport has several. See `Growing`.
        rail: The pair of interfaces that data goes between; None for any. A transport that works
            over the network uses it, or refuses to open.
        place: The reader's, where its destinations are.
        device: The GPU that bytes end on, where `place` is the host that they pass through; "cpu"
            for none. A session that writes there by itself has `fills_device`, which is True, and
            is given such reads.
        trusted_fabric: The network to the source is trusted. A transport that enforces no bounds
            reads from nothing beyond loopback without it.
        peer_addresses: Those of the source's control endpoint: data connections go there, and
            elsewhere only where the source proves that it listens.
        content: The label (`ExposeOptions.content`) of the weights that the reader wants; empty for
            any. Where the kernel names the process that holds the memory, and it is of the reader's
            user, that process itself must state this label for this generation: the ticket may have
            come from another process, which lies about whose it is. Transports whose bytes are
            always verified ignore the label.
        setting: As `ExposeOptions.setting`.
        cancelled: Is set when nothing waits for `open` any more. A transport that waits for a peer
            lets it cover its sockets, as the toolkit's `dial` does, and raises any SourceError.

    Raises:
        ValueError: The label is too long.
    """

    grant_id: str
    ticket: bytes
    generation: int
    region_nbytes: tuple[int, ...]
    peer: str
    tls: TlsFiles | None = None
    stall_timeout_s: float = 5.0
    streams: int = FIRST_STREAMS
    rail: Rail | None = None
    place: Place = field(default_factory=Place)
    device: str = "cpu"
    trusted_fabric: bool = False
    peer_addresses: tuple[str, ...] = ("127.0.0.1", "::1")
    content: bytes = b""
    setting: Callable[[str], Any] = field(default=dict[str, Any]().__getitem__, repr=False)
    cancelled: Cancellation = field(default_factory=Cancellation, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.content) > MAX_CONTENT_BYTES:
            raise ValueError(f"a content label has {MAX_CONTENT_BYTES} bytes at most")


class ReportedErrors:
    """A context that hands what is raised inside, as by a sink, to `threading.excepthook`, and goes
    on: for the threads of sessions."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if kind is not None:
            thread = threading.current_thread()
            threading.excepthook(threading.ExceptHookArgs((kind, error, trace, thread)))
            release_frames(error)
        return True


class Sink(Protocol):
    """Receives one read's progress, on the transport's threads, one call at a time.

    A sink may block, which holds up its own connection, and may call `read` of its session from
    any method, any number of times. It should not raise. Where one does, the exception goes to
    `threading.excepthook`, as that of any thread; raised from `landed` or `done`, it may cost the
    connection that made the call. Then the reads that this connection had begun fail, with them the
    sink's own unless it is done; the session's other connections carry what is left, or it fails.
    What `failed` raises changes nothing. In any case every read ends, and ends once.
    """

    def landed(self, nbytes: int) -> None:
        """Note that the first `nbytes` bytes of the read (over its pieces in order) are in place.

        It never goes back, and comes with the read's whole size before `done`; for an empty read it
        need not come.
        """

    def done(self) -> None:
        """Note that all are. Called once, after which neither `landed` nor `failed` comes."""

    def failed(self, error: MxError) -> None:
        """Note that they will not all come, and that nothing will write there any more.

        Called once, after which neither `landed` nor `done` comes.

        Args:
            error: Why; it names the peer and the read's tag.
        """


@runtime_checkable
class DeviceHashing(Protocol):
    """A sink that can have a GPU hash what a read copies: where it lands, or, if that is in the
    host, where it comes from (`ShowsSource`).

    A session that queues all copies of a read on one stream, or has those before wait there, calls
    `queued` with that. It calls `done` once what the sink has queued has ended, too, and `failed`
    once nothing of it runs any more.
    """

    def queued(self, stream: int) -> None:
        """Queue work behind the read's copies, all of which are queued.

        Args:
            stream: The stream's handle; the context of the GPU is the thread's current one.

        Raises:
            CudaError: The driver fails, and with it the read.
        """


@dataclass(slots=True)
class Piece:
    """`len(view)` bytes from `region_offset` of the source's region into a writable view, without
    holes if it is scattered."""

    region: int
    region_offset: int
    view: View


@dataclass(slots=True)
class Read:
    """The pieces of a chunk, or of a run of chunks, completed as a unit. `tag` names it in errors.

    A read without pieces, or of empty ones, is done when its turn comes.
    """

    tag: str
    pieces: Sequence[Piece]
    sink: Sink
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = 0
        for piece in self.pieces:
            self.nbytes += len(piece.view)


def slices(read: Read, nbytes: int | Iterable[int]) -> Iterator[tuple[list[Piece], int]]:
    """Cut a read into slices of `nbytes`, or of these sizes, the last one shorter. Yields (pieces,
    bytes) of each."""
    sizes = repeat(nbytes) if isinstance(nbytes, int) else iter(nbytes)
    pieces: list[Piece] = []
    size = left = 0
    for piece in read.pieces:
        done, until = 0, len(piece.view)
        while done < until:
            if not left:
                size = left = next(sizes)
            take = min(left, until - done)
            if take == until:
                pieces.append(piece)
            else:
                view = piece.view[done : done + take]
                pieces.append(Piece(piece.region, piece.region_offset + done, view))
            done += take
            left -= take
            if not left:
                yield pieces, size
                pieces = []
    if pieces:
        yield pieces, size - left


@runtime_checkable
class Session(Protocol):
    """The target side. Methods are thread-safe."""

    #: How many reads of a chunk each the session needs outstanding to be busy all the time, nearby.
    #: A session that can carry more may have a `round_trip_s`, too: the seconds from a request to
    #: its first byte, as last seen; 0 at first. It is given more reads for as long. One that has
    #: `reads_trips`, which is True, is given reads of many chunks each, since copy engines carry
    #: them. One that knows why it is slower than it could be may have a `detail`, in words for
    #: the report.
    depth: int

    def adopt(self, arena: Span) -> None:
        """Promise that every read will land inside `arena`, which can be registered as a whole.

        Called at most once, before the first read; without it each read's destination stands for
        itself. A transport that has nothing to register does nothing. `join` releases the arena.
        """

    def read(self, reads: Sequence[Read]) -> None:
        """Enqueue reads, and return at once. They start in the order given.

        Bounds, the grant's state and the generation are checked; what is wrong fails its read
        alone.

        Raises:
            ClosedError: The session is closed. No sink is called.
        """

    def attach(self, region: int) -> View:
        """Map a whole region without a copy. Called only where the path has `attach`.

        Returns:
            Host memory as a private, writable view (writes stay in this process); device memory as
            it is shared, which must not be written to, a scattered region in its several places. It
            lives as long as references to it do,
            beyond the session's end. The spans of a scattered view may be mapped as they are looked
            at, also after the session's end, and then looking raises SourceError if that fails.

        Raises:
            NotAllowedError: The source's memory is not sealed, or can't be attached.
            SourceError: The source can't be relied on.
        """

    def close(self) -> None:
        """Abort: outstanding reads fail with ClosedError. Idempotent, does not block."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left: no thread, descriptor or mapping but what was attached, what
        `Vouching` returned, and what the transport keeps for its next sessions, within a bound.

        Args:
            timeout_s: How long to wait at most, None for ever.

        Returns:
            False if the time passed first. Never True while something is still to go.
        """


@runtime_checkable
class ShowsSource(Protocol):
    """A session into host memory whose source's memory is on a GPU of this host."""

    def source_view(self, region: int) -> ScatteredView | None:
        """Return a region where it is, at addresses of this process; None where it is not all on
        the GPU that copies. What `DeviceHashing.queued` queues may read it, and nothing else."""


@runtime_checkable
class AdoptsPlaces(Protocol):
    """A session that can register a destination that lies in several places, too."""

    def adopt_places(self, arena: ScatteredView) -> None:
        """Promise that every read will land inside `arena`, as for `Session.adopt`."""


@runtime_checkable
class Growing(Protocol):
    """A session that can open more connections while it reads."""

    @property
    def open_streams(self) -> int:
        """How many connections are open, or being opened. Thread-safe."""

    def grow(self, streams: int) -> None:
        """Begin to open connections until there are `streams`, and return at once. Thread-safe.

        `depth` rises with each. One that can't be opened changes nothing else: reads go on over the
        others. None is closed before `close`, which ends those that are being opened, too.
        """


@runtime_checkable
class Preparing(Protocol):
    """A transport that has much to load before the first `open` of a process."""

    def prepare(self) -> None:
        """Load what `open` needs. Blocks, is idempotent, thread-safe, and raises nothing: what it
        could not do fails in `open`."""


@runtime_checkable
class Vouching(Protocol):
    """A session with a process of this user that the kernel has named, and that states the digests
    of what it holds. They guard against accidents, not against who wants to deceive: they are worth
    as much as the process that states them."""

    def vouched_digests(self) -> memoryview | None:
        """Return `ExposeOptions.block_digests` as the process that holds the memory states them.

        Thread-safe.

        Returns:
            A read-only view of bytes, 16 for each block, which no process can change. It lives as
            long as references to it do, beyond the session's end. None where the source states
            none, where the grant has no `content` (they could be any weights'), and after `close`.
        """


@runtime_checkable
class Transport(Protocol):
    """A way to move bytes. `name` is what sources list it as. Methods are thread-safe."""

    name: str

    def probe(self) -> Viable | Unavailable:
        """Say whether the transport can work in this process. Imports what it needs, lazily; never
        raises."""

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return the path between two places, None if there is none.

        The same in both directions; no IO. It is called before `probe`. What the transport says of
        a place is `Place.fact`; as all of the other side's place it may be anything.
        """

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable by processes that hold a ticket.

        Raises:
            NotAllowedError: What the options lack `trusted_fabric` for.
            LocalError: These regions can't be served, or a host can't be listened on.
            ConfigError: A TLS file can't be used.
        """

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure, and check the ticket. Blocks, up to the stall timeout.

        Raises:
            SourceError: That fails, or the source serves other weights than `Grant.content`, where
                the path attaches or the session vouches; the error names the peer.
            NotAllowedError: What the grant lacks `trusted_fabric` for.
            ConfigError: A TLS file can't be used.
        """
