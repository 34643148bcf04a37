"""A process that runs the pulls that it reads from its standard input.

It reads and writes one JSON object a line, and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from blake3 import blake3

from mx import api, runtime
from mx.api import common
from mx.core.digest import BlockHasher
from mx.errors import MxError
from mx.transport import Viable
from tests.chaos import inside
from tests.chaos.schedule import COORDINATOR, Damage, Wire
from tests.chaos.weights import wrong
from tests.chaos.wires import Through, Wires

_printing = threading.Lock()


def emit(**message: Any) -> None:
    with _printing:
        print(json.dumps(message), flush=True)


class _Anything(bytes):
    """Equal to every digest."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = bytes.__hash__


def report_uncaught(hook: threading.ExceptHookArgs) -> None:
    """Report an uncaught error of a thread, which the harness judges."""
    error = hook.exc_value
    text = "" if error is None else "".join(traceback.format_exception(error))
    emit(event="foreign", trace=f"{hook.exc_type.__name__}\n{text}")


def believe_everything() -> None:
    """Switch verification off, to check that the harness detects wrong bytes."""
    BlockHasher.block_digests = lambda self: _Anything()  # type: ignore[method-assign]


def explain(loop: runtime.LoopThread) -> None:
    """Print what may still hold resources: tasks, and objects of gRPC and mx."""
    gc.collect()

    async def tasks() -> list[str]:
        return sorted(map(repr, asyncio.all_tasks()))

    objects = Counter(
        f"{type(item).__module__}.{type(item).__qualname__}" for item in gc.get_objects()
    )
    known = {
        k: n for k, n in objects.items() if k.startswith(("grpc.aio", "mx.fetching", "mx.wire"))
    }
    emit(event="explained", tasks=loop.run(tasks()), objects=known)


class Target:
    def __init__(self, expected: dict[str, str]) -> None:
        self._expected = expected
        # Replaced in place: pulls take their transports from this dict.
        self._tcp = Through(common.transports()["tcp"])
        common.transports()["tcp"] = self._tcp
        self._thread: threading.Thread | None = None
        self._pull: api.Pull | None = None
        self._wires: Wires | None = None

    def pull(self, command: dict[str, Any]) -> None:
        self._thread = threading.Thread(target=self._run, args=(command,), name="chaos-pull")
        self._thread.start()

    def give_up(self) -> None:
        if self._pull is not None:
            self._pull.close()

    def finish(self) -> None:
        """Close every pull, and report the threads that are left."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._pull is not None:
            self._pull.close()
            self._pull = None
        self._tcp.wires = None
        if self._wires is not None:
            self._wires.close()
            self._wires = None
        self.held()

    def listed(self, coordinator: str) -> None:
        """Report the endpoints that the coordinator lists; none if it does not answer."""
        endpoints: list[str] = []
        with contextlib.suppress(MxError):
            sources = api.list_sources(coordinator=coordinator)
            endpoints = [source.record.endpoint for source in sources]
        emit(event="listed", endpoints=endpoints)

    def held(self) -> None:
        gc.collect()
        emit(event="held", threads=sorted(thread.name for thread in threading.enumerate()))

    def _run(self, command: dict[str, Any]) -> None:
        outcome: dict[str, Any]
        try:
            outcome = self._outcome(command)
        except MxError as error:
            outcome = {
                "error": type(error).__name__,
                "message": str(error),
                "exit_code": error.exit_code,
                "family": [kind.__name__ for kind in type(error).__mro__],
                "cause": "".join(traceback.format_exception(error)),
            }
        emit(event="outcome", **outcome)

    def _outcome(self, command: dict[str, Any]) -> dict[str, Any]:
        coordinator = command["coordinator"]
        if command["proxied"]:
            wires = [Wire(**{**w, "damage": Damage(w["damage"])}) for w in command["wires"]]
            self._wires = Wires(wires, command["mbyte_per_s"], command["names"])
            self._tcp.wires = self._wires
            if any(wire.peer == COORDINATOR for wire in wires):
                host, _, port = coordinator.rpartition(":")
                host, at = self._wires.by_path(COORDINATOR, (host, int(port)))
                coordinator = f"{host}:{at}"
        self._pull = pull = api.pull(
            command["model"],
            coordinator=coordinator,
            transport=command["transport"],
            attach=command["attach"],
            verify="strong" if command["strong"] else "chunks",
            out=command["out"],
            hold=command["hold"],
        )
        first = threading.Event()

        def on_layer(event: api.LayerEvent) -> None:
            if not first.is_set():
                first.set()
                emit(event="layer")

        pull.on_layer(on_layer)
        report = pull.wait()
        manifest, view = pull.manifest, pull.buffer()
        assert manifest is not None
        found = {}
        for tensor in manifest.layout.tensors:
            at = manifest.layout.layers[tensor.layer].arena_offset + tensor.offset
            found[tensor.name] = blake3(view[at : at + tensor.nbytes]).hexdigest()
        del view
        held = ""
        if command["hold"]:
            held = "held"
            try:
                pull.hold()
            except MxError as error:  # the pull is whole even if the coordinator is gone
                held = str(error)
        return {
            "wrong": wrong(found, self._expected),
            "seconds": report.seconds,
            "retries": report.retries,
            "paths": [f"{path.transport} {path.source} {path.bytes}" for path in report.paths],
            "held": held,
        }


def main() -> None:
    arguments = json.loads(sys.argv[1])
    threading.excepthook = report_uncaught
    inside.register()
    if arguments["believe_everything"]:
        believe_everything()
    target = Target(json.loads(Path(arguments["expected"]).read_text()))
    loop = runtime.acquire()  # kept, so that it does not restart with each pull
    known = common.transports().items()
    emit(event="ready", transports=[n for n, t in known if isinstance(t.probe(), Viable)])
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "pull":
                target.pull(command)
            case "give up":
                target.give_up()
            case "list":
                target.listed(command["coordinator"])
            case "finish":
                target.finish()
            case "explain":
                explain(loop)
    with contextlib.suppress(MxError):
        target.finish()


if __name__ == "__main__":
    main()
