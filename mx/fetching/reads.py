"""The connections that a pull reads through."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mx.core.paths import Medium, Rail
from mx.core.planner import SourcePath
from mx.core.striping import ConnectionLoad
from mx.errors import (
    ClosedError,
    MxError,
    PathError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.transport import Session

if TYPE_CHECKING:
    from mx.cuda.source_digests import SourceDigests

#: A read's errors after which its session is given up: peer or path are at fault, not the chunk.
CONNECTION_ERRORS = (
    PathError,
    PeerLostError,
    PeerTimeoutError,
    PeerRefusedError,
    StaleGenerationError,
    ClosedError,
)


class ReadLease(Protocol):
    """The lease of a read, which is checked before the read's bytes are used."""

    def check(self) -> MxError | None:
        """Return None while the lease holds, and its generation; else the error."""

    @property
    def coordinated(self) -> bool:
        """True once the source has said that other pulls read there too."""

    @property
    def lease_s(self) -> float:
        """How long the lease lasts from one renewal on."""

    @property
    def answers(self) -> bool:
        """True if the source can be asked whether a chunk is right in its memory."""

    def ask(self, chunk: int, right: Callable[[], None]) -> None:
        """Ask that; does not block, and works on any thread.

        Args:
            chunk: The chunk.
            right: Called if the source says that it is. If it is not, `check` returns a
                `SourceChangedError` soon.
        """

    def end(self, *, lost: bool = False) -> None:
        """Give the lease back; does not block. Idempotent. `lost`: a connection on it was lost."""


class StoreSource(NamedTuple):
    """A store in place of a source: `key` is what it is blamed by, `endpoint` what it is called."""

    key: str
    endpoint: str


class StorePath(NamedTuple):
    """The path to a store, as far as a transfer asks for it. Its speed is not known before."""

    source: StoreSource
    transport: str
    gb_per_s: float = 0.0
    rail: Rail | None = None
    medium: Medium = Medium.MEMORY
    staged: bool = False


@dataclass(slots=True, eq=False)
class Connection:
    """One open session over a path, the lease that it stands on, and what came through it.

    Session and lease belong to the `Connector` that opened them.
    """

    path: SourcePath | StorePath
    lease: ReadLease
    session: Session
    sockets: Sequence[socket.socket] = ()  # that its session was opened with
    opened_at_s: float = 0.0  # monotonic: when it was first read through
    lost: bool = False
    #: The transfer's state of it, once it is added there.
    load: ConnectionLoad | None = None

    #: What the process that holds the memory says the shortcut digests of all blocks are, where the
    #: kernel vouches that it is this user's.
    vouched: memoryview | None = None
    #: Has the source's GPU hash what is read; the transfer's, which closes it.
    digests: SourceDigests | None = None

    @property
    def peer(self) -> str:
        """The source's endpoint, which names it in errors and reports."""
        return self.path.source.endpoint

    @property
    def link(self) -> str:
        """This host's address that the bytes come to, "" if they do not leave the host: as the
        kernel has it of the sockets, whatever place the source declares."""
        known = self.path.medium is not Medium.NETWORK
        for sock in self.sockets:
            with contextlib.suppress(OSError):  # it is closed, or TLS has taken it over
                near, far = sock.getsockname(), sock.getpeername()
                if sock.family != socket.AF_UNIX and near[0] != far[0]:
                    return str(near[0])
                known = True
        return "" if known else "network"

    @property
    def bytes_per_s(self) -> float:
        """Its speed as seen last, at first the expected one."""
        return 0.0 if self.load is None else self.load.pace.bytes_per_s

    @property
    def trip_s(self) -> float:
        """How long a trip takes at most; 0: its session has each part read by itself."""
        return self.lease.lease_s / 4 if getattr(self.session, "reads_trips", False) else 0.0

    @property
    def verified_nbytes(self) -> int:
        return 0 if self.load is None else self.load.verified_nbytes

    @property
    def wrong_parts(self) -> int:
        """How many parts that came through it had wrong digests."""
        return 0 if self.load is None else self.load.wrong_parts

    @property
    def verified_at_s(self) -> float:
        return 0.0 if self.load is None else self.load.verified_at_s
