"""The workers' half of the connector for KV blocks: reads them, and gives what was computed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from mx import config
from mx.engines.replica.logs import logger_of
from mx.engines.vllm.keys import engine_version
from mx.engines.vllm.kv_names import form_of, total_heads
from mx.engines.vllm.kv_saves import KvSaver
from mx.engines.vllm.worker import weights_of
from mx.errors import ConfigError, MxError
from mx.kv import KvFetch, KvKey, KvMemory, KvReader
from mx.log import event

log = logger_of("vLLM")

#: Where a snapshot has KV blocks.
KV_FOLDER = "kv"

#: What a rank's pool, and a folder of files, may have, unless the options say otherwise.
POOL_BYTES, FILES_BYTES = "1GiB", "8GiB"
#: How long a rank waits to hear of blocks that the scheduler has heard of.
HEAR_S = 0.25
#: How long a step that computes nothing waits for blocks on their way.
IDLE_S = 0.005
#: How long a request that another replica has prefilled waits for its blocks.
WAIT_S = 2.0


@dataclass(frozen=True)
class ConnectorOptions:
    """The connector's extra configuration.

    Attributes:
        model: The model's name; "" for that which the loader `mx-peer` has loaded.
        pin: The identity of the checkpoint, in hexadecimal, where mx has not loaded it, or engines
            with different numbers of ranks are to share blocks; "" for what the loader knows.
        peers: HOST:PORT of pools, besides those of the model's sources.
        pool: What each rank's pool may have, such as "4GiB".
        files: A folder in which blocks are kept beyond the pool, and from which they are read; ""
            for none.
        files_bytes: What all files in it may have.
        read_files: Further folders from which blocks are read.
        wait_s: How long a request that another replica has prefilled waits for its blocks.
        settings: Those of mx.
    """

    model: str = ""
    pin: str = ""
    peers: tuple[str, ...] = ()
    pool: str = POOL_BYTES
    files: str = ""
    files_bytes: str = FILES_BYTES
    read_files: tuple[str, ...] = ()
    wait_s: float = WAIT_S
    settings: config.Settings = field(default_factory=config.Settings)

    @classmethod
    def read(cls, given: dict[str, Any]) -> ConnectorOptions:
        """Read the extra configuration, which may have settings of mx, too. Raises ConfigError."""
        known = {each.name for each in fields(cls)} - {"settings"}
        for name in given.keys() - known - config.descriptions().keys():
            raise ConfigError(f"the connector's extra configuration has no option {name!r}")
        own = {name: value for name, value in given.items() if name in known}
        rest = {name: value for name, value in given.items() if name not in known}
        return cls(**own, settings=config.given(config.load(), **rest))

    def folders(self, vllm_config: Any) -> list[str]:
        """Return the folders from which blocks are read: also that of the snapshot from which the
        loader has the weights."""
        extra = vllm_config.load_config.model_loader_extra_config
        snapshot = extra.get("snapshot") if isinstance(extra, Mapping) else None
        own = [self.files] if self.files else []
        return [*own, *self.read_files, *([f"{snapshot}/{KV_FOLDER}"] if snapshot else [])]


@dataclass
class RankWeights(KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler: by rank, the name of the model, the identity of its weights
    ("" while they change), and the form of its blocks."""

    weights: dict[int, tuple[str, str]]
    form: KvKey

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, RankWeights)
        return RankWeights(self.weights | other.weights, self.form)


@dataclass
class KvMoves(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells workers: blocks to read, by request, and to give, each with its
    number in the engine's cache and what comes before it in its prompt; by rank, the weights that
    their names are of."""

    weights: dict[int, tuple[str, str]]
    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    stores: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    reset: bool = False
    #: Requests wait for blocks that are listed nowhere yet.
    waiting: bool = False


@dataclass
class _Load:
    """The blocks of one request that are to be read into those of the engine's cache, and what the
    weights are. `fetch` is None until this rank's reader has heard of all blocks, as the
    scheduler's has, or `until_s`."""

    blocks: list[tuple[bytes, int]]
    identity: str
    until_s: float
    fetch: KvFetch | None = None


class KvWorker:
    """Reads blocks into the engine's cache, and gives what was computed from a pool of its own."""

    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self._config, self._options = vllm_config, options
        transfer = vllm_config.kv_transfer_config
        self._gives, self._takes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._rank = vllm_config.parallel_config.rank
        self._form: KvKey | None = None
        self._cache: list[torch.Tensor] = []
        self._layers: dict[str, int] = {}  # by the engine's names
        self._memory: KvMemory
        self._reader: KvReader | None = None
        self._saver: KvSaver | None = None
        self._saves: KvMoves | None = None  # what it has begun to save
        self._first: str | None = None  # what the weights were when `pin` was right
        self._loading: dict[str, _Load] = {}
        self._done: set[str] = set()
        self._bad: set[int] = set()
        self.counts: Counter[str] = Counter()

    # -- what is held -----------------------------------------------------------------------------

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache: blocks, heads, tokens, elements of each layer."""
        tensors = list(caches.values())
        shapes = {(tuple(each.shape), each.stride(), each.dtype) for each in tensors}
        if len(shapes) != 1 or tensors[0].ndim != 4 or tensors[0].device.type != "cpu":
            event(log, "kv.off", level=logging.WARNING, text="no KV blocks of such caches move")
            return
        heads = tensors[0].shape[1]
        total = total_heads(self._config, heads)
        tp_rank = self._rank % self._config.parallel_config.tensor_parallel_size
        tp_size = self._config.parallel_config.tensor_parallel_size
        first = 0 if total == heads else tp_rank * total // tp_size
        self._cache, self._layers = tensors, {name: at for at, name in enumerate(caches)}
        self._form = form_of(self._config, tensors[0], len(tensors), engine_version())
        self._memory = KvMemory.of(tensors, 0, 1, first)
        try:
            self._open()
        except MxError as error:
            self._form = None
            event(log, "kv.off", level=logging.WARNING, text=str(error))

    def _open(self) -> None:
        assert self._form is not None
        name, options = self._name(), self._options
        settings = options.settings
        if self._gives:
            made = KvSaver(name, self._form, self._cache, self._memory, options.pool, settings)
            self._saver = made
            if options.files:
                made.write_files(options.files, options.files_bytes, settings)
        if self._takes:
            self._reader = KvReader.open(
                name,
                self._form,
                self._memory,
                peers=self._options.peers,
                files=self._options.folders(self._config),
                coordinator=settings.coordinator,
                settings=settings,
            )

    def _name(self) -> str:
        name = self._options.model or weights_of(self._config)[0]
        if not name:
            raise ConfigError("the KV blocks have no name", hint="give `model` in the options")
        return name

    def told(self) -> RankWeights | None:
        """Return what this rank holds; None if its blocks do not move."""
        if self._form is None:
            return None
        return RankWeights({self._rank: (self._name(), self._identity())}, self._form)

    def _identity(self) -> str:
        """Return the identity of the weights as they are now; "" while they change."""
        now = weights_of(self._config)[1]
        self._first = self._first or now
        unchanged = now is None or now == self._first != ""
        return self._options.pin if self._options.pin and unchanged else now or ""

    # -- steps ------------------------------------------------------------------------------------

    def start(self, moves: KvMoves, *, computes: bool) -> None:
        """Begin to read what the scheduler wants.

        Args:
            moves: What it wants.
            computes: This step computes something.
        """
        identity = self._identity()
        known = moves.weights.get(self._rank, ("", ""))[1] == identity != ""
        for request, blocks in moves.loads.items():
            of = identity if known else "other"
            self._loading[request] = _Load(blocks, of, time.monotonic() + HEAR_S)
        self._fetch()
        if not computes:
            self._let_threads_run(moves)

    def _fetch(self, until_s: float = 0.0) -> None:
        """Begin to read what this rank's reader has heard of; wait so long to hear of it."""
        for request, load in list(self._loading.items()):
            if load.fetch is not None:
                continue
            names = [name for name, _ in load.blocks]
            if self._reader is None or load.identity != self._identity():  # they have changed since
                self._end(request, names)
                continue
            wait_s = max(0.0, until_s - time.monotonic())
            heard = self._reader.wait_for(names, wait_s) == len(names)
            if heard or time.monotonic() >= load.until_s:
                load.fetch = self._reader.fetch(load.blocks)

    def _let_threads_run(self, moves: KvMoves) -> None:
        """Wait a little for what is on its way. An engine that computes nothing takes one step
        after the other, and each time one of mx's threads wants the interpreter it waits 5 ms."""
        until_s = time.monotonic() + IDLE_S
        self._fetch(until_s)
        for load in self._loading.values():
            if load.fetch is not None:
                load.fetch.wait(max(0.0, until_s - time.monotonic()))
        if moves.waiting and not self._loading:
            time.sleep(IDLE_S / 5)

    def save_layer(self, name: str, moves: KvMoves) -> None:
        """Copy a layer, which is computed, of the blocks that this step computes."""
        if self._saver is not None and name in self._layers:
            self._begin_saving(self._saver, moves)
            self._saver.copy(self._layers[name])

    def save(self, moves: KvMoves) -> None:
        """List the blocks that this step has computed; copy what was not copied."""
        if self._saver is not None:
            self._begin_saving(self._saver, moves)
            self._saves = None
            if moves.weights.get(self._rank, ("", ""))[1] == self._identity():
                self._saver.end()
            else:
                self._saver.drop()

    def _begin_saving(self, saver: KvSaver, moves: KvMoves) -> None:
        if self._saves is moves:
            return
        self._saves = moves
        if moves.reset:
            saver.pool.clear()
        fits = moves.weights.get(self._rank, ("", ""))[1] == self._identity()
        saver.begin(moves.stores if fits else [], self.counts)

    def finished(self) -> set[str]:
        """Return the requests whose blocks are there, or failed."""
        for request, load in list(self._loading.items()):
            if load.fetch is not None and load.fetch.is_done:
                self._end(request, load.fetch.failed)
        done, self._done = self._done, set()
        return done

    def _end(self, request: str, failed: Collection[bytes]) -> None:
        load = self._loading.pop(request)
        self._done.add(request)
        self._bad |= {number for block, number in load.blocks if block in failed}
        self.counts["loaded"] += len(load.blocks) - len(failed)
        self.counts["failed"] += len(failed)

    def failed(self) -> set[int]:
        """Return the blocks of the engine's cache that could not be filled."""
        bad, self._bad = self._bad, set()
        return bad

    def close(self) -> None:
        """Close what this has opened. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._saver is not None:
            self._saver.close()
