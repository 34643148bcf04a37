"""The connections that a pull reads through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mx.core.digest import ChunkHasher
from mx.core.planner import SourcePath
from mx.core.striping import ConnectionLoad
from mx.core.types import Segment
from mx.errors import (
    ClosedError,
    MxError,
    PathError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)
from mx.transport import Session, Span

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

    def end(self) -> None:
        """Give the lease back; does not block. Idempotent."""


class Hasher(Protocol):
    """Hashes part of a chunk while it lands; `mx.core.digest.ChunkHasher` is one."""

    def landed(self, payload_nbytes: int) -> None: ...
    def block_digests(self) -> bytes: ...


#: Makes a hasher for segments that land in these spans.
MakeHasher = Callable[[Sequence[Segment], Sequence[Span]], Hasher]


def host_hasher(segments: Sequence[Segment], spans: Sequence[Span]) -> Hasher:
    return ChunkHasher(segments, spans)  # type: ignore[arg-type]


@dataclass(slots=True, eq=False)
class Connection:
    """One open session over a path, the lease that it stands on, and what came through it.

    Session and lease belong to the `Connector` that opened them.
    """

    path: SourcePath
    lease: ReadLease
    session: Session
    opened_at_s: float = 0.0  # monotonic: when it was first read through
    lost: bool = False
    #: The transfer's state of it, once it is added there.
    load: ConnectionLoad | None = None

    @property
    def peer(self) -> str:
        """The source's endpoint, which names it in errors and reports."""
        return self.path.source.endpoint

    @property
    def verified_nbytes(self) -> int:
        return 0 if self.load is None else self.load.verified_nbytes

    @property
    def verified_at_s(self) -> float:
        return 0.0 if self.load is None else self.load.verified_at_s
