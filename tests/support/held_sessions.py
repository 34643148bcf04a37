"""Sessions that end their reads when the test says so, and a model of three chunks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.roots import root_of
from mx.core import manifest as manifests
from mx.core.digest import block_digest, shortcut_digest
from mx.core.planner import SourcePath
from mx.core.types import Manifest, Packaging
from mx.errors import ClosedError, MxError
from mx.fetching.reads import Connection
from mx.fetching.report import VerifiedBy
from mx.transport import Read, Session, View, host_view
from mx.units import MIB
from tests.support.records import make_documents, make_record

BYTES = bytes(range(256)) * (3 * MIB // 256)
PAGE = b"".join(block_digest(BYTES[at : at + MIB]) for at in range(0, len(BYTES), MIB))
SHORTCUTS = b"".join(shortcut_digest(BYTES[at : at + MIB]) for at in range(0, len(BYTES), MIB))


def manifest_of_three_chunks() -> Manifest:
    """Return the manifest of `BYTES`."""
    layout = manifests.plan_layout([manifests.TensorSpec("model.weight", "U8", (len(BYTES),))])
    return manifests.encode(layout, Packaging(), {"model.weight": root_of(BYTES)})


class HeldSession:
    """Keeps its reads until the test ends them; after `close`, refuses more."""

    depth = 6
    round_trip_s = 0.0

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.closed = False

    def read(self, reads: Sequence[Read]) -> None:
        if self.closed:
            raise ClosedError("closed")
        self.reads += reads

    def land(self, content: bytes = BYTES) -> None:
        """Complete the first read with the bytes of `content`."""
        read = self.reads.pop(0)
        for piece in read.pieces:
            host_view(piece.view)[:] = content[
                piece.region_offset : piece.region_offset + len(piece.view)
            ]
        read.sink.landed(read.nbytes)
        read.sink.done()

    def fail(self, error: MxError) -> None:
        self.reads.pop(0).sink.failed(error)

    def adopt(self, arena: View) -> None:
        pass

    def attach(self, region: int) -> memoryview:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

    def join(self, timeout_s: float | None = None) -> bool:
        return not self.reads


class Lease:
    """A lease that holds unless a test sets its `error`."""

    error: MxError | None = None
    coordinated = False
    answers = False
    lease_s = 10.0

    def check(self) -> MxError | None:
        return self.error

    def ask(self, chunk: int, right: Callable[[], None]) -> None:
        raise NotImplementedError

    def end(self, *, lost: bool = False) -> None: ...


def connection_of(
    session: Session, lease: Lease | None = None, vouched: bytes | None = None
) -> Connection:
    """Return a connection over this session."""
    source = replace(make_record(make_documents("w")), endpoint="peer")
    return Connection(
        SourcePath(source, "held", 0.0, False, ""),
        lease or Lease(),
        session,
        vouched=None if vouched is None else memoryview(vouched),
    )


class Listener:
    """Keeps what a transfer tells it."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.verified_by: list[VerifiedBy] = []
        self.lost: list[int] = []
        self.causes: Sequence[MxError] = ()
        self.broke: MxError | None = None
        self.raises: BaseException | None = None

    def layer_ready(self, layer: int, arena: View, by: VerifiedBy) -> None:
        self.ready.append(layer)
        self.verified_by.append(by)
        if self.raises is not None:
            raise self.raises

    def connection_lost(self, connection: int, error: MxError) -> None:
        self.lost.append(connection)

    def failed(self, causes: Sequence[MxError]) -> None:
        self.causes = causes

    def broken(self, error: MxError) -> None:
        self.broke = error
