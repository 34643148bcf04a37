"""A source that lies, in a process of its own: `python -m tests.hostile.liar LIES`.

LIES is a JSON object. "checkpoint", "model" and "coordinator" (null: none) are what it claims to
serve, and where it registers. Its lies, each of them absent for the truth:

    bytes      of the first block of each tensor: "others", or "forged", with the right xxh3_128
    digests    "own": block digests of its own bytes
    pages      how it answers Pages: a name in PAGES
    layout     "garbage": a layout document that describes no weights; "backwards": one of these
               weights with the last layer first
    files      "others": other bytes of the side files, under the right digests; "endless": more
               than were announced, for ever; "silent": none, and no end; "stopped": the first byte
    uid        the user that it becomes; it claims to be still the one that started it
    tickets    the endpoint of a source whose shm tickets it hands out as its own
    crowd      as how many sources it registers
    whole      false: it says that it lacks the last layer
    rows       "others": rows that say of all layers that they are where the first one is

It prints its endpoint as JSON, and serves until SIGTERM. It is the first among equal sources.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mx import api, codec, config, plugins, runtime
from mx.core.canonical import write_json
from mx.core.digest import document_digest
from mx.core.extents import ExtentMap
from mx.core.pages import Pages
from mx.core.types import AddressTable, Layout, Manifest, ModelKey, SourceRole, TableRow
from mx.memory.arena import MemfdArena
from mx.source.limits import SourceLimits
from mx.source.model import SourceModel, hold_checkpoint
from mx.source.server import SourceOptions, SourceServer
from mx.source.service import PeerServicer
from mx.transport import ScatteredView, host_view
from mx.units import MIB
from mx.wire.channel import Remote, Role, dial
from mx.wire.documents import DocumentsServicer
from mx.wire.lease import Lease
from mx.wire.rpc import Stub
from mx.wire.v1 import common_pb2, peer_pb2
from mx_transports.toolkit.local import LocalExposure
from tests.support.hashing import blocks_of, pages_of, shortcuts_of
from tests.support.lies import change, insist, lie

Answer = Callable[[list[peer_pb2.LayerPage]], AsyncIterator[peer_pb2.LayerPage]]
#: A byte of a page comes after this long.
DRIP_S = 1.0
TRANSPORTS = {name: each for name, each in plugins.transports().items() if name in ("shm", "tcp")}
PR_SET_DUMPABLE = 4


# -- pages -------------------------------------------------------------------------------------


async def of_another_model(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right:
        yield peer_pb2.LayerPage(layer=page.layer, offset=page.offset, data=page.data[::-1])


async def truncated(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right:
        yield peer_pb2.LayerPage(layer=page.layer, offset=page.offset, data=page.data[:-32])


async def oversized(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right:
        yield peer_pb2.LayerPage(layer=page.layer, data=page.data + bytes(MIB))


async def endless(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for number in itertools.count():
        yield peer_pb2.LayerPage(layer=right[0].layer, offset=32 * number, data=bytes(32))


async def unasked(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right:
        yield peer_pb2.LayerPage(layer=page.layer + 1000, offset=page.offset, data=page.data)


async def none(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right[:0]:
        yield page


async def silent(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    await asyncio.Event().wait()
    yield right[0]


async def dripping(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for page in right:
        for at in range(len(page.data)):
            await asyncio.sleep(DRIP_S)
            yield peer_pb2.LayerPage(layer=page.layer, offset=at, data=page.data[at : at + 1])


async def of_another_model_together(
    right: list[peer_pb2.LayerPage],
) -> AsyncIterator[peer_pb2.LayerPage]:
    for each in right:
        yield peer_pb2.LayerPage(data=each.data[::-1], layers=each.layers)


async def unasked_together(right: list[peer_pb2.LayerPage]) -> AsyncIterator[peer_pb2.LayerPage]:
    for each in right:
        layers = [common_pb2.Range(begin=a.begin + 1000, end=a.end + 1000) for a in each.layers]
        yield peer_pb2.LayerPage(data=each.data, layers=layers)


#: By name: whether it lies about messages with several pages, and how.
PAGES: Mapping[str, tuple[bool, Answer]] = {
    "of another model": (False, of_another_model),
    "truncated": (False, truncated),
    "oversized": (False, oversized),
    "endless": (False, endless),
    "unasked": (False, unasked),
    "none": (False, none),
    "silent": (False, silent),
    "dripping": (False, dripping),
    "of another model, together": (True, of_another_model_together),
    "unasked, together": (True, unasked_together),
}


def answer_pages(batches: bool, how: Answer) -> None:
    honest = PeerServicer.Pages

    async def pages(
        self: PeerServicer, request: peer_pb2.PagesRequest, context: Any
    ) -> AsyncIterator[peer_pb2.LayerPage]:
        request.batches = batches
        right = [page async for page in honest(self, request, context)]
        async for page in how(right):
            yield page

    lie(PeerServicer, "Pages", pages)


# -- the others --------------------------------------------------------------------------------


def other_files(manifest: Manifest) -> None:
    """Send other bytes of the same length for each side file."""
    honest, digests = PeerServicer.documents, {s.digest for s in manifest.packaging.side_files}

    def documents(
        self: PeerServicer, context: Any, asked: Sequence[bytes]
    ) -> Callable[[bytes], bytes | None]:
        lookup = honest(self, context, asked)

        def lie(digest: bytes) -> bytes | None:
            data = lookup(digest)
            return bytes(each ^ 1 for each in data) if data and digest in digests else data

        return lie

    lie(PeerServicer, "documents", documents)


async def endless_file(digest: bytes, data: bytes) -> AsyncIterator[common_pb2.Page]:
    for offset in itertools.count(step=len(data)):
        yield common_pb2.Page(digest=digest, offset=offset, nbytes=len(data), data=data)


async def silent_file(digest: bytes, data: bytes) -> AsyncIterator[common_pb2.Page]:
    await asyncio.Event().wait()
    yield common_pb2.Page(digest=digest, nbytes=len(data), data=data)


async def stopped_file(digest: bytes, data: bytes) -> AsyncIterator[common_pb2.Page]:
    yield common_pb2.Page(digest=digest, nbytes=len(data), data=data[:1])


FILES = {"endless": endless_file, "silent": silent_file, "stopped": stopped_file}


def answer_files(manifest: Manifest, how: str) -> None:
    honest, digests = DocumentsServicer.Fetch, {s.digest for s in manifest.packaging.side_files}

    async def fetch(
        self: DocumentsServicer, request: common_pb2.FetchRequest, context: Any
    ) -> AsyncIterator[common_pb2.Page]:
        if not digests.isdisjoint(request.digests):
            for digest in request.digests:
                async for page in FILES[how](digest, manifest.documents[digest]):
                    yield page
            return
        async for page in honest(self, request, context):
            yield page

    lie(DocumentsServicer, "Fetch", fetch)


def false_layout(manifest: Manifest, how: str) -> Manifest:
    ref = manifest.ref
    layout = b"{}\n" + bytes(100)
    if how == "backwards":
        head, _, names = manifest.documents[ref.layout].partition(b"\n")
        document = json.loads(head)
        counts = document["layer_tensors"]
        tensors = list(zip(names.split(b"\0"), document["kind"], strict=True))
        ends = list(itertools.accumulate(counts))
        layers = [tensors[end - count : end] for end, count in zip(ends, counts, strict=True)]
        tensors = [each for layer in reversed(layers) for each in layer]
        document |= {
            "kind": [kind for _, kind in tensors],
            "layer_names": document["layer_names"][::-1],
            "layer_tensors": counts[::-1],
        }
        layout = write_json(document) + b"\n" + b"\0".join(name for name, _ in tensors)
    sizes = (ref.sizes[0], len(layout), ref.sizes[2])
    ref = replace(ref, layout=document_digest(layout), sizes=sizes)
    return replace(manifest, ref=ref, documents=manifest.documents | {ref.layout: layout})


def become(uid: int) -> None:
    """Become another user, who lets everybody read."""
    lie(LocalExposure, "admits", lambda self, sock: True)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its /proc is root's


def offer_once(options: SourceOptions, held: SourceModel) -> None:
    """Import all that offering takes, which another user may not be able to read."""
    loop = runtime.acquire()
    server = loop.run(api.start_source(options, TRANSPORTS))
    loop.run(server.offer(replace(held, borrowed=True)))
    loop.run(server.close())
    runtime.release(loop)


async def tickets_of(endpoint: str, server: SourceServer) -> Lease:
    """Get an shm ticket of another source, and hand it out. It works while the lease is open."""
    channel = dial(endpoint)
    stub = Stub(
        channel,
        peer_pb2.DESCRIPTOR.services_by_name["Peer"],
        Remote(Role.SOURCE, endpoint),
    )
    described = await stub.Describe(peer_pb2.DescribeRequest())
    record = codec.source_from_wire(described.sources[0])
    lease = Lease(channel, record, lambda: None)
    granted = await lease.open(server._place, ["shm"], 10.0)
    for served in server._servicer.models.values():
        lie(served.exposures["shm"], "grant", lambda grant_id: granted.tickets["shm"])
    return lease


def change_some(layout: Layout, view: memoryview, how: str) -> None:
    """Change the first block of each tensor."""
    chosen = random.Random(11)
    for layer in range(len(layout.layers)):
        for first, *_ in blocks_of(layout, view, layer):
            change(first, how, chosen)


def held_model(lies: Mapping[str, Any]) -> SourceModel:
    honest = hold_checkpoint(
        Path(lies["checkpoint"]),
        ModelKey(lies["model"]),
        shortcuts=True,
        threads=2,
    )
    manifest, layout = honest.manifest, honest.manifest.layout
    arena = MemfdArena(layout.arena_nbytes, name="lies")
    arena.view[:] = host_view(honest.arena.view)
    honest.arena.release()
    if "bytes" in lies:
        change_some(layout, arena.view, lies["bytes"])
    pages, shortcuts = honest.pages, honest.shortcuts
    if lies.get("digests") == "own":
        pages = Pages.whole(manifest, pages_of(layout, arena.view))
        shortcuts = shortcuts_of(layout, arena.view)
    arena.seal()
    if "layout" in lies:
        manifest = false_layout(manifest, lies["layout"])
    held = replace(
        honest,
        manifest=manifest,
        arena=arena,
        pages=pages,
        shortcuts=shortcuts,
        source_id=lies.get("source_id", source_id(0)),
    )
    if "rows" in lies:
        misplace(held)
    if not lies.get("whole", True):
        held = replace(held, role=SourceRole.RELAY, layers=((0, len(layout.layers) - 1),))
    return held


def misplace(held: SourceModel) -> None:
    """Register rows that say of all layers that they are where the first one is, and send that."""
    layers, arena = held.manifest.layout.layers, host_view(held.arena.view)
    rows = tuple(TableRow(layer.index, 0, layer.nbytes, 0, 0) for layer in layers)
    spans = [arena[: layer.nbytes] for layer in layers]
    begins = [layer.arena_offset for layer in layers]
    places = ExtentMap.of_table(held.manifest.layout, AddressTable(b"", (), rows))
    lie(SourceModel, "scattered", property(lambda self: True))
    lie(SourceModel, "places", lambda self: places)
    lie(SourceModel, "view", lambda self: ScatteredView.over(begins, spans, len(arena)))


def source_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{os.getpid():08x}{number:04x}"


def serve(lies: Mapping[str, Any]) -> None:
    held = held_model(lies)
    options = api.source_options(config.load(environ={"HOME": "/nonexistent"}))
    uid = os.getuid()
    lie(SourceLimits, "idle", lambda self: [])  # it has all the time in the world
    if lies.get("files") == "others":
        other_files(held.manifest)
    elif "files" in lies:
        answer_files(held.manifest, lies["files"])
    if "pages" in lies:
        answer_pages(*PAGES[lies["pages"]])
    if "uid" in lies:
        offer_once(options, held)
        become(lies["uid"])
    loop = runtime.acquire()
    server = loop.run(api.start_source(options, TRANSPORTS))
    lease: Lease | None = None
    try:
        loop.run(server.offer(held))
        for number in range(1, lies.get("crowd", 1)):
            each = replace(held, source_id=source_id(number), borrowed=True)
            loop.run(server.offer(each))
        if "uid" in lies:
            server._place = replace(server._place, **{"uid": uid, **lies.get("place", {})})
        if "tickets" in lies:
            lease = loop.run(tickets_of(lies["tickets"], server))
        if lies.get("coordinator"):
            loop.run(server.register(lies["coordinator"]))
        print(json.dumps({"endpoint": server.endpoint}), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    finally:
        if lease is not None:
            loop.run(lease.close())
        loop.run(server.close())
        runtime.release(loop)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    insist()
    serve(json.loads(sys.argv[1]))
