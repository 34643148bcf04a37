"""A transport over sockets that sends bytes compressed, and the same with a lie about it."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from mx.core.topology import Place
from mx.errors import PeerProtocolError
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Read,
    Session,
    Span,
    Unavailable,
    Viable,
    host_view,
)
from mx.units import KIB
from mx_transports.toolkit import dial, framing
from mx_transports.toolkit.exposure import GrantState
from mx_transports.toolkit.reach import one_network
from mx_transports.toolkit.sending import CompressingExposure
from mx_transports.toolkit.session import StreamSession
from mx_transports.toolkit.slicing import host_pieces
from mx_transports.toolkit.stream import SocketStream

MAGIC = b"packed\0\1"
REQUEST = struct.Struct("!QIQQ")  # generation, region, offset, nbytes
#: A status, and how many bytes follow: of each step of a piece in turn, and at its end.
ANSWER = struct.Struct("!II")
STEP_BYTES = 128 * KIB
#: What zlib adds at most to so many bytes.
MOST_PACKED_BYTES = STEP_BYTES + STEP_BYTES // 64


class PackedExposure(CompressingExposure):
    def __init__(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> None:
        super().__init__(regions, options, name="packed", magic=MAGIC)
        self.start()

    def serve(self, stream: SocketStream, grant: GrantState) -> None:
        request = memoryview(bytearray(REQUEST.size))
        while True:
            stream.next_message(request)
            generation, region, offset, nbytes = REQUEST.unpack(request)
            views = self.views(region, offset, nbytes)
            status = framing.OUT_OF_RANGE if views is None else self.status(generation)
            if status == framing.OK:
                with self.reading(grant):
                    for at in range(0, nbytes, STEP_BYTES):
                        size = min(STEP_BYTES, nbytes - at)
                        step = self.views(region, offset + at, size) or []
                        self.send_packed(stream, grant, b"".join(map(host_view, step)))
                status = self.status(generation)
            stream.send_all([ANSWER.pack(status, 0)])

    def send_packed(self, stream: SocketStream, grant: GrantState, raw: bytes) -> None:
        packed = zlib.compress(raw, 1)
        head = ANSWER.pack(framing.OK, len(packed))
        self.send(stream, grant, head, [memoryview(packed)])
        self.saved(grant, len(raw) - len(packed))


class PackedSession(StreamSession):
    def __init__(self, grant: Grant, streams: list[SocketStream]) -> None:
        super().__init__("packed", grant, streams)
        self.start()

    def fetch(self, worker: int, read: Read) -> None:
        self.check_generation(framing.MAX_U64)
        stream, landed = self.streams[worker], 0
        for region, offset, view in host_pieces(read):
            stream.send_all([REQUEST.pack(self.grant.generation, region, offset, len(view))])
            for start in range(0, len(view), STEP_BYTES):
                step = view[start : start + STEP_BYTES]
                step[:] = self.unpacked(stream, len(step))
                landed += len(step)
                read.sink.landed(landed)
            self.answer(stream)

    def unpacked(self, stream: SocketStream, nbytes: int) -> bytes:
        packed = stream.receive(self.answer(stream))
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(packed, nbytes)  # a few bytes may stand for very many
        except zlib.error as error:
            raise PeerProtocolError(f"{self.peer}: {error}", peer=self.peer) from error
        if len(raw) != nbytes or not inflate.eof:
            raise PeerProtocolError(f"{self.peer} packed other bytes", peer=self.peer)
        return raw

    def answer(self, stream: SocketStream) -> int:
        status, nbytes = ANSWER.unpack(stream.receive(ANSWER.size))
        if status != framing.OK:
            raise framing.refusal(status, self.peer)
        if nbytes > MOST_PACKED_BYTES:
            raise PeerProtocolError(f"{self.peer} sends {nbytes} bytes at once", peer=self.peer)
        return int(nbytes)


class PackedTransport:
    name = "packed"
    exposure_type = PackedExposure

    def probe(self) -> Viable | Unavailable:
        return Viable("sockets and zlib")

    def reach(self, here: Place, there: Place) -> Path | None:
        if here.device != "cpu" or there.device != "cpu" or one_network(here, there) is None:
            return None
        return Path(self.name, 0.1, medium=Medium.NETWORK)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        return self.exposure_type(regions, options)

    def open(self, grant: Grant) -> Session:
        return PackedSession(grant, dial.open_streams(MAGIC, grant))


class LyingExposure(PackedExposure):
    """Says that it compresses, counts half of what it sends, and sends all of it as it is."""

    def send_packed(self, stream: SocketStream, grant: GrantState, raw: bytes) -> None:
        stored = zlib.compress(raw, 0)
        half: list[Span] = [memoryview(stored)[: len(stored) // 2]]
        self.send(stream, grant, ANSWER.pack(framing.OK, len(stored)), half)
        stream.send_all([stored[len(stored) // 2 :]])
        self.saved(grant, len(raw) - len(stored) // 2)


class LyingTransport(PackedTransport):
    exposure_type = LyingExposure


class StoringExposure(PackedExposure):
    """Takes as many bytes from its limiter as it would send compressed, and sends all."""

    def send_packed(self, stream: SocketStream, grant: GrantState, raw: bytes) -> None:
        packed, stored = len(zlib.compress(raw, 1)), zlib.compress(raw, 0)
        begin: list[Span] = [memoryview(stored)[:packed]]
        self.send(stream, grant, ANSWER.pack(framing.OK, len(stored)), begin)
        stream.send_all([stored[packed:]])
        self.saved(grant, len(raw) - min(packed, len(stored)))


class StoringTransport(PackedTransport):
    exposure_type = StoringExposure
