"""The target of `benchmarks.far`: pulls by mx's own data path, without control, from a ticket.

Run as a program. For each line that it reads, an object in JSON (`ticket`, in hex; `grant_id`,
`source_nbytes`, `layers` of LAYER_BYTES), it pulls, and prints the seconds from the first
connection to the last layer. It imports mx from wherever PYTHONPATH says: another version of mx can
take turns.
"""

from __future__ import annotations

import json
import mmap
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from mx.core import manifest as manifests
from mx.core.digest import block_digest
from mx.core.pages import Pages
from mx.core.planner import SourcePath
from mx.core.topology import Place
from mx.core.types import AddressTable, ManifestRef, ModelKey, Packaging, SourceRecord
from mx.errors import MxError
from mx.fetching.reads import Connection
from mx.fetching.transfer import Transfer
from mx.transport import Grant
from mx_transports.tcp import TcpTransport

from ..roots import root_of

LAYER_BYTES = 16 << 20
MIB = 1 << 20
BLOCK = b"\x5a" * MIB
PEER = "localhost:1"


class _Lease:
    coordinated = False
    answers = False
    lease_s = 10.0

    def check(self) -> MxError | None:
        return None

    def ask(self, *_: object) -> None:
        raise NotImplementedError

    def end(self, *, lost: bool = False) -> None: ...


class _Listener:
    def __init__(self, layers: int) -> None:
        self.left = layers
        self.ended = threading.Event()
        self.errors: Sequence[MxError] = ()

    def layer_ready(self, *_: object) -> None:
        self.left -= 1
        if not self.left:
            self.ended.set()

    def connection_lost(self, _: int, error: MxError) -> None:
        self.failed([error])

    def failed(self, causes: Sequence[MxError]) -> None:
        self.errors = causes
        self.ended.set()

    def broken(self, error: MxError) -> None:
        self.failed([error])


def _path() -> SourcePath:
    ref = ManifestRef(bytes(32), bytes(32), b"", (0, 0, 0))
    table = AddressTable(layout_digest=bytes(32), regions=(), held=())
    key = ModelKey("far", "main", "checkpoint")
    source = SourceRecord("far", key, ref, PEER, Place(), 1, table, ("tcp",))
    return SourcePath(source, "tcp", 3.0, False, "")


def _seconds(order: dict[str, Any]) -> float:
    count = order["layers"]
    names = [f"model.layers.{index}.weight" for index in range(count)]
    layout = manifests.plan_layout(
        [manifests.TensorSpec(name, "U8", (LAYER_BYTES,)) for name in names]
    )
    root = root_of(BLOCK * (LAYER_BYTES // MIB))
    manifest = manifests.encode(layout, Packaging(), dict.fromkeys(names, root))
    page = block_digest(BLOCK) * (LAYER_BYTES // MIB)
    listener = _Listener(count)
    ticket = bytes.fromhex(order["ticket"])
    start_s = time.monotonic()
    grant = Grant(order["grant_id"], ticket, 1, (order["source_nbytes"],), PEER, stall_timeout_s=30)
    session = TcpTransport().open(grant)
    room = mmap.mmap(-1, layout.arena_nbytes, flags=mmap.MAP_PRIVATE)
    room.madvise(mmap.MADV_HUGEPAGE)
    transfer = Transfer(manifest, Pages.whole(manifest, [page] * count), memoryview(room), listener)
    transfer.add_connection(Connection(_path(), _Lease(), session))
    listener.ended.wait()
    passed_s = time.monotonic() - start_s
    if listener.errors:
        raise listener.errors[0]
    transfer.close()
    transfer.join(60)
    return passed_s


if __name__ == "__main__":
    for line in sys.stdin:
        print(_seconds(json.loads(line)), flush=True)
