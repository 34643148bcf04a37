"""Runs a command of mx and writes what its pull did when: `python -m benchmarks.traced FILE pull
...`. Times are those of the machine's monotonic clock, which all of its processes share."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

_BEGAN_S = time.monotonic()


class _Tracer:
    """Records spans, reads and messages of this process."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, float]] = []
        #: Of each part that was read: its source's endpoint, chunk, begin, end; None: it failed.
        self._reads: list[list[Any]] = []
        self._hashed_s = 0.0
        self._sent, self._heard = Counter[str](), Counter[str]()
        self._asked: dict[tuple[int, int], float] = {}
        #: What was answered to each request, and after how long.
        self._answers: list[tuple[str, float]] = []
        self._patched = False

    def event(self, event: Any) -> None:
        """Take an event of `mx.trace`."""
        if event.name == "pull.connect" and not self._patched:  # the modules are loaded by now
            self._patched = True
            self._watch_reads()
            self._watch_messages()
        self._spans.append((event.name, event.kind, event.at_s))

    def _watch_reads(self) -> None:
        from mx.fetching.sink import PartSink
        from mx.fetching.transfer import Transfer

        begun: dict[int, list[Any]] = {}
        init, done, landed = PartSink.__init__, Transfer.read_done, PartSink.landed

        def traced_init(sink: PartSink, transfer: Transfer, connection: int, *rest: Any) -> None:
            init(sink, transfer, connection, *rest)
            peer = transfer.connections[connection].peer
            begun[id(sink)] = [peer, sink.part.chunk, time.monotonic(), None]
            self._reads.append(begun[id(sink)])

        def traced_done(transfer: Transfer, sink: Any) -> None:
            if id(sink) in begun:
                begun.pop(id(sink))[3] = time.monotonic()
            done(transfer, sink)

        def traced_landed(sink: PartSink, nbytes: int) -> None:
            began_s = time.thread_time()
            landed(sink, nbytes)
            self._hashed_s += time.thread_time() - began_s

        _replace(Transfer, read_done=traced_done)
        _replace(PartSink, __init__=traced_init, landed=traced_landed)

    def _watch_messages(self) -> None:
        from mx.swarm.node import Node
        from mx.swarm.stream import PeerStream

        send, heard = PeerStream.send, Node.heard

        def traced_send(stream: PeerStream, message: Any) -> None:
            kind = message.WhichOneof("message")
            self._sent[kind] += 1
            if kind == "request":
                self._asked[id(stream), message.request] = time.monotonic()
            send(stream, message)

        def traced_heard(node: Node, number: int, message: Any) -> None:
            kind = message.WhichOneof("message")
            self._heard[kind] += 1
            if kind in ("allow", "reject"):
                stream, chunk = node._peers[number].stream, getattr(message, kind)
                began_s = self._asked.pop((id(stream), chunk), None)
                if began_s is not None:
                    self._answers.append((kind, time.monotonic() - began_s))
            heard(node, number, message)

        _replace(PeerStream, send=traced_send)
        _replace(Node, heard=traced_heard)

    def write(self, path: str) -> None:
        """Write everything to a file, as JSON."""
        found = {
            "began_s": _BEGAN_S,
            "ended_s": time.monotonic(),
            "cpu_s": time.process_time(),
            "hashed_s": self._hashed_s,
            "spans": self._spans,
            "reads": self._reads,
            "sent": self._sent,
            "heard": self._heard,
            "answers": self._answers,
        }
        with open(path, "w") as file:
            json.dump(found, file)


def _replace(of: type, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(of, name, method)


def main() -> None:
    """Run the command, and write the file at its end."""
    path = sys.argv.pop(1)
    from mx import trace

    tracer = _Tracer()
    from mx.cli import main as command

    with trace.listening(tracer.event):
        try:
            command()
        finally:
            tracer.write(path)


if __name__ == "__main__":
    main()
