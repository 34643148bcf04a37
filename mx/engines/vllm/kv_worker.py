"""The workers' half of the connector for KV blocks: reads them, and gives what was computed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from queue import SimpleQueue
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
from mx.engines.vllm.kv_names import form_of, memory_order, total_heads
from mx.engines.vllm.worker import weights_of
from mx.errors import ConfigError, MxError
from mx.kv import KvFetch, KvFiles, KvKey, KvMemory, KvPool, KvReader, freeze_blocks
from mx.log import event
from mx.units import parse_bytes

log = logger_of("vLLM")

#: Where a snapshot has KV blocks.
KV_FOLDER = "kv"

#: What a rank's pool, and a folder of files, may have, unless the options say otherwise.
POOL_BYTES, FILES_BYTES = "1GiB", "8GiB"
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
    number in the engine's cache; by rank, the weights that their names are of."""

    weights: dict[int, tuple[str, str]]
    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    stores: list[tuple[bytes, int]] = field(default_factory=list)
    reset: bool = False


class KvWorker:
    """Reads blocks into the engine's cache, and gives what was computed from a pool of its own."""

    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self._config, self._options = vllm_config, options
        transfer = vllm_config.kv_transfer_config
        self._gives, self._takes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._rank = vllm_config.parallel_config.rank
        self._form: KvKey | None = None
        self._cache: list[torch.Tensor] = []
        self._memory: KvMemory
        self._store: list[torch.Tensor] = []
        self._reader: KvReader | None = None
        self._pool: KvPool | None = None
        self._files: KvFiles | None = None
        self._first: str | None = None  # what the weights were when `pin` was right
        self._loading: dict[str, tuple[KvFetch, dict[bytes, int]]] = {}
        self._done: set[str] = set()
        self._bad: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._hashing: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        self._hasher: threading.Thread | None = None

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
        self._cache = tensors
        self._form = form_of(self._config, tensors[0], len(tensors), engine_version())
        self._memory = KvMemory.of(tensors, 0, 1, first)
        try:
            self._open(first, heads)
        except MxError as error:
            self._form = None
            event(log, "kv.off", level=logging.WARNING, text=str(error))

    def _open(self, first: int, heads: int) -> None:
        assert self._form is not None
        name, settings = self._name(), self._options.settings
        if self._gives:
            part = self._memory.rows[0].nbytes
            layers = len(self._cache)
            slots = int(parse_bytes(self._options.pool)) // (part * layers)
            if slots < 1:
                raise ConfigError(f"`pool` has no place for a KV block of {part * layers} bytes")
            kept = torch.empty(slots, layers, part, dtype=torch.uint8)
            self._store = [
                self._in_order(kept[:, at], cache) for at, cache in enumerate(self._cache)
            ]
            memory = KvMemory.whole(kept, [part] * layers, first, heads)
            self._pool = KvPool.open(name, self._form, memory, settings=settings)
            if self._options.files:
                budget_bytes = parse_bytes(self._options.files_bytes)
                self._files = KvFiles(
                    self._pool, self._options.files, budget_bytes, settings=settings
                )
            self._hasher = threading.Thread(target=self._hash, name="mx-kv-digests", daemon=True)
            self._hasher.start()
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

    @staticmethod
    def _in_order(kept: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the slots of the pool for one layer as tensors of the cache's shape, each element
        where it is in the order of the cache's memory."""
        order = memory_order(cache)
        shape = [cache.shape[at] for at in order]
        typed = kept.view(cache.dtype).view(kept.shape[0], *shape)
        back = [order.index(at) + 1 for at in range(1, 4)]
        return typed.permute(0, *back)

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

    def start(self, moves: KvMoves) -> None:
        """Begin to read what the scheduler wants."""
        fits = moves.weights.get(self._rank, ("", ""))[1] == self._identity() != ""
        for request, blocks in moves.loads.items():
            if self._reader is None or not fits:  # the weights have changed since
                self._bad |= {number for _, number in blocks}
                self._done.add(request)
                self.counts["failed"] += len(blocks)
                continue
            self._loading[request] = self._reader.fetch(blocks), dict(blocks)

    def save(self, moves: KvMoves) -> None:
        """Copy what this step has computed into the pool, and list it."""
        if self._pool is None:
            return
        if moves.reset:
            self._pool.clear()
        if not moves.stores or moves.weights.get(self._rank, ("", ""))[1] != self._identity():
            return
        new = [each for each in moves.stores if self._pool.slot_of(each[0]) is None]
        slots = self._pool.take(len(new))
        self.counts["not stored"] += len(new) - len(slots)
        if not slots:
            return
        there, here = torch.tensor([number for _, number in new[: len(slots)]]), torch.tensor(slots)
        for kept, cache in zip(self._store, self._cache, strict=True):
            kept[here] = cache[there]
        for (block, _), slot in zip(new, slots, strict=False):
            self._hashing.put((block, slot))
        self.counts["stored"] += len(slots)

    def _hash(self) -> None:
        """List blocks once they are hashed; on a thread of its own."""
        while (item := self._hashing.get()) is not None:
            try:
                assert self._pool is not None
                self._pool.publish(*item)
                if self._files is not None:
                    self._files.keep(item[0])
            except MxError as error:
                log.debug("a KV block is not listed: %s", error)

    def finished(self) -> set[str]:
        """Return the requests whose blocks are there, or failed."""
        done, self._done = self._done, set()
        for request, (fetch, numbers) in list(self._loading.items()):
            if fetch.is_done:
                del self._loading[request]
                done.add(request)
                self._bad |= {numbers[block] for block in fetch.failed}
                self.counts["loaded"] += len(numbers) - len(fetch.failed)
                self.counts["failed"] += len(fetch.failed)
        return done

    def failed(self) -> set[int]:
        """Return the blocks of the engine's cache that could not be filled."""
        bad, self._bad = self._bad, set()
        return bad

    def freeze(self, folder: Path, budget_bytes: int) -> int:
        """Write the blocks of use last to a snapshot, up to so many bytes; return how many. Raises
        MxError."""
        if self._pool is None:
            raise ConfigError("this engine gives no KV blocks", hint="give it the role kv_both")
        return freeze_blocks(self._pool, folder / KV_FOLDER, budget_bytes, self._options.settings)

    def close(self) -> None:
        """Close what this has opened. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._hasher is not None:
            self._hashing.put(None)
            self._hasher.join()
            self._hasher = None
        if self._files is not None:
            self._files.close()
        if self._pool is not None:
            self._pool.close()
