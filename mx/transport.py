"""The contract between mx and whatever moves bytes.

A transport is found by the entry-point group `mx.transports` (a callable without arguments that
returns a `Transport`). The suite in `mx.testing.conformance`, not this text, defines what one
must do; third parties run it on theirs.

The source side *exposes* regions and hands out a *ticket* per granted reader; the target side
*opens* a ticket and *reads*. A session completes each read by itself, from threads of its own:
the sink gets `landed` while bytes arrive, then exactly one of `done` and `failed`. After that
the transport never touches the destination again. `close()` aborts what is outstanding (each
fails with `ClosedError`); `join()` returns once no thread, task, descriptor, mapping or DMA of
the session is left. Destinations stay valid until then: that is the caller's duty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from mx.core.paths import Medium, Path, Rail
from mx.core.topology import Place
from mx.errors import LocalError, MxError

__all__ = [
    "DeviceView",
    "ExposeOptions",
    "ExposedRegion",
    "Exposure",
    "Grant",
    "Limiter",
    "Medium",
    "Path",
    "Piece",
    "Rail",
    "Read",
    "Sending",
    "Session",
    "Sink",
    "Span",
    "TlsFiles",
    "Transport",
    "Unavailable",
    "Viable",
    "Witness",
    "host_view",
]


@dataclass(frozen=True, slots=True)
class Viable:
    """The transport can work in this process. `detail` is for people."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """It can't; `reason` says why and, if anything can, what would change that."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Bytes in GPU memory: there what a byte memoryview is in the host's. `device` is
    "cuda:UUID", `address` a device pointer valid in this process; `owner` is referred to for as
    long as the view is, and keeps the memory."""

    device: str
    address: int
    nbytes: int
    owner: object = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice) -> DeviceView:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("a device view is contiguous")
        return DeviceView(self.device, self.address + start, max(0, stop - start), self.owner)


#: Contiguous bytes, wherever they are.
Span = memoryview | DeviceView


def host_view(span: Span) -> memoryview:
    """The span as host memory. Raises LocalError if it is on a device."""
    if isinstance(span, memoryview):
        return span
    raise LocalError(f"this transport cannot reach the memory of {span.device}")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of mutual TLS: this process's certificate and key, and the CA of its peers."""

    certificate: str
    key: str
    authority: str


@dataclass(frozen=True, slots=True)
class ExposedRegion:
    """Memory that a source offers.

    `view` is a read-only byte view of it, or its place on a device, valid until the exposure was
    joined; `address` its first byte's address in this process. `memfd` is the descriptor of a
    sealed memfd that holds exactly this region from its offset 0, or None; the exposure may send
    duplicates of it but never closes it.
    """

    index: int
    view: Span
    address: int
    device: str = "cpu"
    memfd: int | None = None


class Limiter(Protocol):
    """How fast a process may send, over all its transports and readers. Thread-safe."""

    def slice_nbytes(self, grant_id: str) -> int:
        """What may be sent in one go on a grant, for readers to take turns: shared by the grant's
        streams."""

    def delay_s(self, nbytes: int) -> float:
        """Take this many bytes, a slice at most, of what may be sent; returns how many seconds to
        wait before they are, holding no lock."""


@dataclass(frozen=True, slots=True)
class ExposeOptions:
    """How to listen. `hosts` are the addresses for data endpoints (a port each is chosen);
    `place` is the process's, with its interfaces. `trusted_fabric`: whoever can reach those
    addresses is trusted, as transports must be told that enforce no bounds. `limiter`, if given,
    is asked by a `Sending` exposure before it sends. `ports`, if there are any, are the ones to
    choose from; `at_peer` says that readers reach the data endpoints at the host that they dial
    for control, whatever they listen on here (address translation, containers)."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    tls: TlsFiles | None = None
    stall_timeout_s: float = 5.0
    place: Place = field(default_factory=Place)
    trusted_fabric: bool = False
    limiter: Limiter | None = None
    ports: range = range(0)
    at_peer: bool = False


@runtime_checkable
class Exposure(Protocol):
    """The source side of a transport. All methods are thread-safe and do not block on peers."""

    def grant(self, grant_id: str) -> bytes:
        """A ticket for one reader: opaque, carries its secret, not to be logged."""

    def revoke(self, grant_id: str) -> None:
        """Withdraw a ticket: running reads are cut, new ones refused. Unknown ids are ignored."""

    def set_generation(self, generation: int) -> None:
        """Reads that name another generation are refused from now on."""

    def active_readers(self) -> int:
        """Grants that have a read running right now (for draining)."""

    def close(self) -> None:
        """Stop serving. Idempotent."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left behind; False if `timeout_s` passed first."""


@runtime_checkable
class Sending(Protocol):
    """What an exposure is besides that sends the bytes itself, in place of letting readers fetch
    them: it counts what it sends, and keeps to the options' limiter."""

    def sent_bytes(self) -> int:
        """Payload bytes sent so far, whoever to. Thread-safe."""

    def sent_to(self, grant_id: str) -> int:
        """Payload bytes sent on this grant so far, those of running reads counted at least once a
        second; 0 once it was revoked. Thread-safe."""


@runtime_checkable
class Witness(Protocol):
    """What an exposure is besides that knows which grants are used. What readers say that they
    have fetched is believed then only of those that have connected."""

    def used(self) -> Mapping[str, int]:
        """The payload bytes sent so far on each grant whose ticket was used to connect; 0 where
        readers fetch. Thread-safe."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What `open` needs: the ticket, the generation planned on, sizes of the regions by index.

    `peer` is the source's control endpoint, which names it in errors. `rail`, if given, is the
    pair of interfaces to use. `place` is the reader's, where its destinations are.
    `peer_addresses` are those of the source's control endpoint: data connections go there, and
    elsewhere only where the source proves that it listens.
    """

    grant_id: str
    ticket: bytes
    generation: int
    region_nbytes: tuple[int, ...]
    peer: str
    tls: TlsFiles | None = None
    stall_timeout_s: float = 5.0
    streams: int = 2
    rail: Rail | None = None
    place: Place = field(default_factory=Place)
    trusted_fabric: bool = False
    peer_addresses: tuple[str, ...] = ("127.0.0.1", "::1")


class Sink(Protocol):
    """Receives one read's progress, on the transport's threads, one call at a time."""

    def landed(self, nbytes: int) -> None:
        """The first `nbytes` bytes of the read (over its pieces in order) are in place."""

    def done(self) -> None:
        """All are. Called once, after which neither `landed` nor `failed` comes."""

    def failed(self, error: MxError) -> None:
        """They will not all come. Called once; the error names the peer and the read's tag."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`len(view)` bytes from `region_offset` of the source's region into a writable view."""

    region: int
    region_offset: int
    view: Span


@dataclass(slots=True)
class Read:
    """One chunk's worth of pieces, completed as a unit. `tag` names it in errors."""

    tag: str
    pieces: Sequence[Piece]
    sink: Sink
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(len(piece.view) for piece in self.pieces)


@runtime_checkable
class Session(Protocol):
    """The target side. Methods are thread-safe."""

    #: How many reads of a chunk each the session wants outstanding to be busy all the time.
    depth: int

    def adopt(self, arena: Span) -> None:
        """Every read will land inside `arena`: a transport may register it as a whole now. At
        most once, before the first read; without it each read's destination stands for itself.
        """

    def read(self, reads: Sequence[Read]) -> None:
        """Enqueue; returns at once. Raises ClosedError after `close`.

        Bounds, the grant's state and the generation are checked; what is wrong fails its read
        alone. Reads start in the order given.
        """

    def attach(self, region: int) -> Span:
        """Map a whole region without a copy. Host memory comes as a private, writable view
        (writes stay in this process); device memory is shared, and must not be written to. It
        lives as long as references to it do, beyond the session's end.

        Raises NotAllowedError/SourceError where the source's memory is not sealed or not
        attachable; only paths with `attach` are asked.
        """

    def close(self) -> None:
        """Abort: outstanding reads fail with ClosedError. Idempotent, does not block."""

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing is left behind; False if `timeout_s` passed first."""


@runtime_checkable
class Transport(Protocol):
    name: str

    def probe(self) -> Viable | Unavailable:
        """Can it work here at all? Imports what it needs, lazily; never raises."""

    def reach(self, here: Place, there: Place) -> Path | None:
        """The path between two places, or None. Symmetric; no IO."""

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable by those that hold a ticket."""

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure. Raises SourceError (peer named) where that fails."""
