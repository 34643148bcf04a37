"""What a pull's engine reads through, and who hears of what it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mx.core.digest import ChunkHasher
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

#: Errors of a read after which its session is given up: peer or path, not the chunk, are at fault.
CONNECTION_ERRORS = (
    PathError,
    PeerLostError,
    PeerTimeoutError,
    PeerRefusedError,
    StaleGenerationError,
    ClosedError,
)


class ReadLease(Protocol):
    """What a sink asks before it believes a read's bytes."""

    def check(self) -> MxError | None:
        """None while the lease runs and the generation stands; else why not."""


class Hasher(Protocol):
    """Hashes part of a chunk while it lands; `mx.core.digest.ChunkHasher` is one."""

    def landed(self, payload_nbytes: int) -> None: ...
    def block_digests(self) -> bytes: ...


#: Makes one for these segments, which land in these spans.
MakeHasher = Callable[[Sequence[Segment], Sequence[Span]], Hasher]


def host_hasher(segments: Sequence[Segment], spans: Sequence[Span]) -> Hasher:
    return ChunkHasher(segments, spans)  # type: ignore[arg-type]


@dataclass(slots=True)
class Connection:
    """A session to one source, and what came through it. `source` says whose lanes share their
    reputation; `bytes_per_s` is what is expected of it, 0 if nothing is."""

    transport: str
    peer: str
    session: Session
    lease: ReadLease
    opened_at_s: float
    rail: str = ""
    source: str = ""
    bytes_per_s: float = 0.0
    lost: bool = False
    #: What the transfer knows of it, from when it is added there.
    load: ConnectionLoad | None = None

    @property
    def verified_nbytes(self) -> int:
        return 0 if self.load is None else self.load.verified_nbytes

    @property
    def verified_at_s(self) -> float:
        return 0.0 if self.load is None else self.load.verified_at_s
