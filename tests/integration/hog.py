"""A peer that takes whatever a source gives and uses none of it, in a process of its own.

`python -m tests.integration.hog ENDPOINT NAME OPENS [CONNECTIONS]` describes the source, opens so
many leases on each of so many connections, renews those that it gets, and prints a line of JSON
when each was answered. It goes on until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc

from mx.wire.v1 import peer_pb2, peer_pb2_grpc

RENEW_S = 1.0


class Hog:
    def __init__(self, endpoint: str, name: str) -> None:
        self._endpoint = endpoint
        self._ended = threading.Event()
        self._channels: list[grpc.Channel] = []
        source = self.stub().Describe(peer_pb2.DescribeRequest(name=name), timeout=20).sources[0]
        self._first = peer_pb2.OpenRequest(
            source_id=source.source_id,
            identity=source.manifest.identity.digest,
            generation=source.generation,
            place=source.place,
        )

    def stub(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels.append(grpc.insecure_channel(self._endpoint, options=options))
        return peer_pb2_grpc.PeerStub(self._channels[-1])

    def open(self, stub: Any, **fields: Any) -> Any:
        """A lease's stream; renewed, with a claim of more and more bytes, until the end."""

        def messages() -> Iterator[peer_pb2.OpenRequest]:
            request = peer_pb2.OpenRequest(reader_id=str(uuid.uuid4()))
            request.MergeFrom(self._first)
            for field, value in fields.items():
                setattr(request, field, value)
            yield request
            claimed = 0
            while not self._ended.wait(RENEW_S):
                claimed += 1 << 30
                yield peer_pb2.OpenRequest(read_bytes=claimed)

        return stub.Open(messages())

    def end(self) -> None:
        self._ended.set()
        for channel in self._channels:
            channel.close()


def answer(call: Any) -> str:
    """What a lease's first answer was."""
    try:
        return str(next(call).WhichOneof("event"))
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]


def main() -> None:
    endpoint, name, opens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hog = Hog(endpoint, name)
    answers: Counter[str] = Counter()
    calls = []
    for _ in range(int(sys.argv[4]) if len(sys.argv) > 4 else 1):
        stub = hog.stub()
        for _ in range(opens):
            calls.append(hog.open(stub))
            answers[answer(calls[-1])] += 1
    print(json.dumps({"answers": answers, "at_s": time.time()}), flush=True)
    sys.stdin.read()
    hog.end()


if __name__ == "__main__":
    main()
