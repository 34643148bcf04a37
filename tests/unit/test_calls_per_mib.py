"""What a MiB costs at the target, in calls of Python and C functions on the threads of a session:
their number depends on no other program."""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter
from collections.abc import Sequence
from types import FrameType

import pytest

from benchmarks.read_cost import no_lease, path_for
from mx.buffers import address_of, map_at
from mx.core import manifest as manifests
from mx.core import striping
from mx.core.digest import block_digest, tensor_root
from mx.core.grid import BLOCK_BYTES
from mx.core.pages import Pages
from mx.core.types import Manifest, Packaging
from mx.errors import MxError
from mx.fetching.reads import Connection
from mx.fetching.report import VerifiedBy
from mx.fetching.transfer import Transfer
from mx.transport import ExposedRegion, ExposeOptions, Grant, Transport, View
from mx.units import MIB
from mx_transports.shm import ShmTransport
from mx_transports.tcp import TcpTransport
from mx_transports.toolkit.session import ThreadedSession

#: In chunks of 16 MiB, as the chunks of every larger model are.
NBYTES, TENSORS = 1024 * MIB, 16
#: The target's memory lies in as many bytes, again and again: all that comes is zeros.
MEMORY_NBYTES = 64 * MIB
#: The digests of one tensor's blocks.
PAGE = block_digest(bytes(BLOCK_BYTES)) * (NBYTES // TENSORS // BLOCK_BYTES)
#: Calls of functions in Python and in C.
MOST_PYTHON_CALLS, MOST_C_CALLS = 8, 14


class _Calls:
    """A profile function that counts the calls of each thread."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int | None, str]] = Counter()

    def __call__(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.counts[threading.get_ident(), event] += 1


class _Listener:
    def __init__(self) -> None:
        self.layers = 0
        self.errors: list[MxError] = []
        self.ended = threading.Event()

    def layer_ready(self, layer: int, arena: View, by: VerifiedBy) -> None:
        self.layers += 1
        if self.layers == TENSORS:
            self.ended.set()

    def connection_lost(self, connection: int, error: MxError) -> None:
        self.broken(error)

    def failed(self, causes: Sequence[MxError]) -> None:
        self.errors += causes
        self.ended.set()

    def broken(self, error: MxError) -> None:
        self.failed((error,))


def _zeros() -> Manifest:
    names = [f"model.layers.{index}.mlp.weight" for index in range(TENSORS)]
    nbytes = NBYTES // TENSORS
    layout = manifests.plan_layout([manifests.TensorSpec(name, "U8", (nbytes,)) for name in names])
    roots = dict.fromkeys(names, tensor_root(nbytes, PAGE))
    return manifests.encode(layout, Packaging(), roots)


def _folded() -> memoryview:
    """Return `NBYTES` bytes in `MEMORY_NBYTES` of memory."""
    view = memoryview(mmap.mmap(-1, NBYTES, flags=mmap.MAP_PRIVATE))
    descriptor = os.memfd_create("folded")
    os.ftruncate(descriptor, MEMORY_NBYTES)
    for at in range(0, NBYTES, MEMORY_NBYTES):
        map_at(
            address_of(view) + at,
            MEMORY_NBYTES,
            descriptor=descriptor,
            protection=mmap.PROT_READ | mmap.PROT_WRITE,
            flags=mmap.MAP_SHARED,
        )
    os.close(descriptor)
    return view


@pytest.fixture(autouse=True)
def _whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is what a connection reads in this time: the chunks are whole on a busy machine, too,
    as they are over every fast link."""
    monkeypatch.setattr(striping, "PART_S", 3600.0)


@pytest.mark.parametrize("transport", [TcpTransport(), ShmTransport()], ids=lambda each: each.name)
def test_a_mib_makes_few_calls(transport: Transport) -> None:
    source, manifest, listener, calls = mmap.mmap(-1, NBYTES), _zeros(), _Listener(), _Calls()
    view = memoryview(source)
    region = ExposedRegion(0, view.toreadonly(), address_of(view))
    exposure = transport.expose([region], ExposeOptions())
    exposure.set_generation(1)
    pages = Pages.whole(manifest, [PAGE] * TENSORS)
    transfer = Transfer(manifest, pages, _folded(), listener)
    threading.setprofile(calls)
    try:
        session = transport.open(Grant("g", exposure.grant("g"), 1, (NBYTES,), "127.0.0.1:1"))
    finally:
        threading.setprofile(None)
    transfer.add_connection(Connection(path_for(transport.name), no_lease(), session))
    assert listener.ended.wait(120) and not listener.errors
    transfer.close()
    assert session.join(30) and transfer.join(30)
    exposure.close()
    assert exposure.join(30)
    assert isinstance(session, ThreadedSession)
    mine = {thread.ident for thread in session.threads}
    found = Counter[str]()
    for (thread, event), count in calls.counts.items():
        if thread in mine:
            found[event] += count
    mibs = NBYTES // MIB
    assert found["call"] <= MOST_PYTHON_CALLS * mibs, found["call"] / mibs
    assert found["c_call"] <= MOST_C_CALLS * mibs, found["c_call"] / mibs
    assert found["call"] >= mibs / 8  # it has counted
