"""A peer that takes whatever a source gives and uses none of it, in a process of its own.

`python -m tests.integration.lease_hog ENDPOINT NAME OPENS CONNECTIONS STREAMS` describes the
source, opens so many leases on each of so many connections, renews those that it gets, connects
so many times with each tcp ticket, and prints a line of JSON when each was answered. It goes on
until its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from mx.core.versions import headers
from mx.wire.v1 import peer_pb2
from mx_transports.tcp.wire import MAGIC
from mx_transports.toolkit import framing
from tests.support.stubs import blocking_stub

RENEW_S = 1.0


class Hog:
    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint = endpoint
        self._ended = threading.Event()
        self._channels: list[grpc.Channel] = []
        described = self.stub().Describe(
            peer_pb2.DescribeRequest(name=name), timeout=20, metadata=headers()
        )
        source = described.sources[0]
        self._first = peer_pb2.OpenRequest(
            source_id=source.source_id,
            identity=source.manifest.identity.digest,
            generation=source.generation,
            place=source.place,
        )

    def stub(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels.append(grpc.insecure_channel(self._endpoint, options=options))
        return blocking_stub(self._channels[-1], peer_pb2.DESCRIPTOR.services_by_name["Peer"])

    def open(self, stub: Any, **fields: Any) -> Any:
        """A lease's stream; renewed, with a claim of more and more bytes, until the end."""

        def messages() -> Iterator[peer_pb2.OpenRequest]:
            request = peer_pb2.OpenRequest(reader_id=str(uuid.uuid4()))
            request.MergeFrom(self._first)
            request.MergeFrom(peer_pb2.OpenRequest(**fields))
            yield request
            claimed = 0
            while not self._ended.wait(RENEW_S):
                claimed += 1 << 30
                yield peer_pb2.OpenRequest(read_bytes=claimed)

        return stub.Open(messages(), metadata=headers())

    def end(self) -> None:
        self._ended.set()
        for channel in self._channels:
            channel.close()


def first_event(call: Any) -> tuple[str, Any]:
    """What a lease's first answer was, and the answer."""
    try:
        event = next(call)
    except grpc.RpcError as error:
        return str(error.code().name), None
    return str(event.WhichOneof("event")), event


def answer(call: Any) -> str:
    return first_event(call)[0]


def connect(event: Any, streams: int) -> Iterator[socket.socket]:
    """Data connections by the tcp ticket of a grant, each let in or not."""
    for each in event.granted.tickets:
        if each.transport == "tcp":
            ticket = framing.decode_ticket(each.ticket, "source")
            host, port = ticket.fields["addresses"][0]  # type: ignore[index]
            for _ in range(streams):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection((host, port), 20)
                    sock.sendall(framing.PREAMBLE.pack(MAGIC, ticket.key, ticket.secret))
                    yield sock


def main() -> None:
    endpoint, name = sys.argv[1:3]
    opens, connections, streams = map(int, sys.argv[3:6])
    hog = Hog(endpoint, name)
    answers: Counter[str] = Counter()
    calls: list[Any] = []
    sockets: list[socket.socket] = []
    for _ in range(connections):
        stub = hog.stub()
        for _ in range(opens):
            calls.append(hog.open(stub))
            kind, event = first_event(calls[-1])
            answers[kind] += 1
            if kind == "granted":
                sockets += connect(event, streams)
    print(json.dumps({"answers": answers, "sockets": len(sockets)}), flush=True)
    sys.stdin.read()
    hog.end()
    for sock in sockets:
        sock.close()


if __name__ == "__main__":
    main()
