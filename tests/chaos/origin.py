"""A process that serves the model under several names, or from memory that changes.

It reads and writes one JSON object a line, and ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mx import api, config, namekey, runtime
from mx.api import common
from mx.core.topology import Place
from mx.core.types import ModelKey
from mx.errors import CoordinatorError
from mx.memory.arena import HostArena
from mx.source.model import SourceModel
from mx.source.server import SourceServer
from mx.storage.load import load_opened
from mx.storage.safetensors import open_checkpoint
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Session,
    Transport,
    Unavailable,
    Viable,
)
from mx.transport import (
    Path as SourcePath,
)
from tests.chaos import inside


def emit(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def until_served(serve: Any) -> Any:
    """Call `serve` until it returns: the coordinator may be restarting."""
    while True:
        try:
            return serve()
        except CoordinatorError:
            time.sleep(0.1)


class _Remembering:
    """A transport that remembers what it exposed."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.exposures: list[Exposure] = []

    def probe(self) -> Viable | Unavailable:
        return self._inner.probe()

    def reach(self, here: Place, there: Place) -> SourcePath | None:
        return self._inner.reach(here, there)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        self.exposures.append(self._inner.expose(regions, options))
        return self.exposures[-1]

    def open(self, grant: Grant) -> Session:
        return self._inner.open(grant)


class Fickle:
    """A source whose memory is not sealed, like that of a live engine."""

    def __init__(self, checkpoint: Path, models: Sequence[str], coordinator: str) -> None:
        self._checkpoint = checkpoint
        self._models = models
        self._coordinator = coordinator
        self._settings = config.load()
        self._loop = runtime.acquire()
        self._servers: list[SourceServer] = []
        self._transports: list[_Remembering] = []
        self._memory: list[memoryview] = []
        self._generation = 1

    def start(self) -> dict[str, str]:
        """Offer the model with its right bytes and return the endpoints."""
        self.stop()
        return {model: self._offer(model) for model in self._models}

    def _offer(self, model: str) -> str:
        loaded = load_opened(
            open_checkpoint(self._checkpoint),
            lambda layout: HostArena(layout.arena_nbytes),
            threads=1,
        )
        transports = {name: _Remembering(t) for name, t in common.transports().items()}
        self._transports += transports.values()
        self._memory.append(loaded.arena.view)
        held = SourceModel(
            ModelKey(model),
            loaded.manifest,
            loaded.arena,
            loaded.pages,
            generation=self._generation,
        )
        key = namekey.load(self._settings)
        options = api.source_options(self._settings, name_key=key)
        server = self._loop.run(api.start_source(options, transports))
        self._servers.append(server)
        self._loop.run(api.offer(server, held, self._coordinator))
        return server.endpoint

    def change(self, *, says_so: bool) -> None:
        if says_so:
            self._generation += 1
            for transport in self._transports:
                for exposure in transport.exposures:
                    exposure.set_generation(self._generation)
        for memory in self._memory:
            for at in range(0, len(memory), 64 << 10):
                memory[at] ^= 0xFF

    def stop(self) -> None:
        for server in self._servers:
            self._loop.run(server.close())
        self._servers.clear()
        self._transports.clear()
        self._memory.clear()


def held() -> None:
    gc.collect()
    emit(event="held", threads=sorted(thread.name for thread in threading.enumerate()))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    checkpoint, models = Path(arguments["checkpoint"]), arguments["models"]
    coordinator = arguments["coordinator"]
    inside.register()
    runtime.acquire()
    fickle: Fickle | None = None
    sources: list[api.Source] = []
    if arguments["fickle"]:
        fickle = Fickle(checkpoint, models, coordinator)
        endpoints = until_served(fickle.start)
    else:
        for model in models:
            sources.append(
                until_served(
                    lambda model=model: api.serve(checkpoint, model=model, coordinator=coordinator)
                )
            )
        endpoints = {source.model.name: source.endpoint for source in sources}
    emit(event="ready", endpoints=endpoints)
    for line in sys.stdin:
        match json.loads(line)["do"]:
            case "finish":
                held()
            case "change" if fickle is not None:
                fickle.change(says_so=True)
            case "corrupt" if fickle is not None:
                fickle.change(says_so=False)
            case "renew" if fickle is not None:
                emit(event="ready", endpoints=until_served(fickle.start))
    for source in sources:
        source.close()
    if fickle is not None:
        fickle.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
