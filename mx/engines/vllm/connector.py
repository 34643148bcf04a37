"""vLLM's connector for KV blocks: `kv_connector="MxConnector"` by the path of this module.

The scheduler's half names the blocks of requests and finds them in the pools of other replicas; the
workers' half reads them into the engine's cache, verified, and copies what was computed into a pool
of its own. docs/kv.md says how it is configured.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from mx import config, namekey
from mx.engines.replica.logs import logger_of
from mx.engines.vllm.keys import engine_version
from mx.engines.vllm.kv_names import NamedRequest, form_of, memory_order, total_heads, whole_prefix
from mx.engines.vllm.worker import weights_of
from mx.errors import ConfigError, MxError
from mx.kv import KvFetch, KvKey, KvMemory, KvPool, KvReader, secret_of
from mx.log import event
from mx.units import parse_bytes

log = logger_of("vLLM")

#: What a rank's pool may have, unless the options say otherwise.
POOL_BYTES = "1GiB"
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
        wait_s: How long a request that another replica has prefilled waits for its blocks.
        settings: Those of mx.
    """

    model: str = ""
    pin: str = ""
    peers: tuple[str, ...] = ()
    pool: str = POOL_BYTES
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


@dataclass
class _Rank(KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers tell the scheduler: by rank, the name of the model, the identity of its weights
    ("" while they change), and the form of its blocks."""

    weights: dict[int, tuple[str, str]]
    form: KvKey

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _Rank)
        return _Rank(self.weights | other.weights, self.form)


@dataclass
class _Moves(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells workers: blocks to read, by request, and to give, each with its
    number in the engine's cache; by rank, the weights that their names are of."""

    weights: dict[int, tuple[str, str]]
    loads: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)
    stores: list[tuple[bytes, int]] = field(default_factory=list)
    reset: bool = False


class MxConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The connector, which is made once for the scheduler and once for each worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """
        Args:
            vllm_config: The engine's configuration.
            role: Whose half this is.
            kv_cache_config: What the engine's cache is.

        Raises:
            ConfigError: An option is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = ConnectorOptions.read(dict(transfer.kv_connector_extra_config))
        if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                'MxConnector needs `kv_load_failure_policy`: "recompute": a block that is not '
                "right is computed",
                hint="add it to `kv_transfer_config`",
            )
        half = _SchedulerHalf if role is KVConnectorRole.SCHEDULER else _WorkerHalf
        self._half: Any = half(vllm_config, options)

    # Of the scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        for each in metadata.values():
            self._half.hear(each)

    def update_connector_output(self, connector_output: Any) -> None:
        if (told := connector_output.kv_connector_worker_meta) is not None:
            self._half.hear(told)

    def on_new_request(self, request: Any) -> None:
        self._half.begin(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._half.find(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._half.load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> _Moves:
        return self._half.moves(scheduler_output)  # type: ignore[no-any-return]

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        return False, self._half.end(request)

    def reset_cache(self) -> bool:
        self._half.reset()
        return True

    # Of a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._half.register(kv_caches)

    def get_handshake_metadata(self) -> _Rank | None:
        return self._half.told()  # type: ignore[no-any-return]

    def build_connector_worker_meta(self) -> _Rank | None:
        return self._half.told()  # type: ignore[no-any-return]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves)
        self._half.start(moves)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are computed once their blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are given once they are whole."""

    def wait_for_save(self) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, _Moves)
        self._half.save(moves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        del finished_req_ids
        return None, self._half.finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._half.failed()  # type: ignore[no-any-return]

    def shutdown(self) -> None:
        self._half.close()


class _SchedulerHalf:
    """Names blocks, finds them, and says which are read and given."""

    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self._options, self._ranks = options, vllm_config.parallel_config.world_size
        transfer = vllm_config.kv_transfer_config
        self._gives, self._takes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._weights: dict[int, tuple[str, str]] = {}
        self._form: KvKey | None = None
        self._identity = b""  # of the weights of all ranks; b"": not known, or changing
        self._secret = b""
        self._reader: KvReader | None = None
        self._requests: dict[str, NamedRequest] = {}
        self._waiting_s: dict[str, float] = {}  # by request, until when it waits for its blocks
        self._loads: dict[str, list[tuple[bytes, int]]] = {}
        self._stale = False  # what the engine's own cache holds may be of earlier weights
        self._reset = False
        self._said = ""

    def hear(self, told: _Rank) -> None:
        """Hear what workers hold now."""
        weights = self._weights | told.weights
        if weights == self._weights and self._form is not None:
            return
        self._weights, self._form = weights, told.form
        before, self._identity = self._identity, self._whole()
        if before != self._identity:
            self._stale = self._stale or bool(before)
            for each in self._requests.values():
                each.identity = b""  # its blocks are of both
        if self._identity and self._reader is None:
            self._open()

    def _whole(self) -> bytes:
        """Return the identity of the weights of all ranks together."""
        from blake3 import blake3

        held = [self._weights.get(rank, ("", "")) for rank in range(self._ranks)]
        if not all(identity for _, identity in held):
            self._say(
                "the identity of the weights is not known: load them by `mx-peer`, or give `pin`"
            )
            return b""
        self._say("")
        if len({identity for _, identity in held}) == 1:
            return bytes.fromhex(held[0][1])
        return blake3("\n".join(identity for _, identity in held).encode()).digest()

    def _say(self, why: str) -> None:
        if why and why != self._said:
            event(log, "kv.off", level=logging.WARNING, text=why)
        self._said = why

    def _open(self) -> None:
        assert self._form is not None
        name, settings = self._weights[0][0], self._options.settings
        try:
            self._secret = secret_of(namekey.load(settings), name)
            if self._takes:
                self._reader = KvReader.open(
                    name,
                    self._form,
                    None,
                    peers=self._options.peers,
                    coordinator=settings.coordinator,
                    settings=settings,
                )
        except MxError as error:
            self._identity = b""
            self._say(str(error))

    def begin(self, request: Any) -> None:
        """Note a new request."""
        self._requests[request.request_id] = NamedRequest(request, self._identity)

    def _named(self, request: Any) -> list[bytes]:
        """Return the names of a request's whole blocks; none if they have no names."""
        named = self._requests.get(request.request_id)
        if named is None or not named.identity or not self._secret or self._form is None:
            return []
        if why := named.why_not:
            log.debug("no KV blocks of a request are named: %s", why)
            return []
        return named.names(self._secret, self._form)

    def find(self, request: Any, computed: int) -> int | None:
        """Return how many tokens beyond those computed other replicas have; None: ask again."""
        names = self._named(request) if self._reader is not None else []
        if not names or self._form is None or self._reader is None:
            return 0
        size = self._form.block_tokens
        first = computed // size
        wanted = names[first : whole_prefix(request.num_tokens, size)]
        self._requests[request.request_id].found = first, wanted
        found = self._reader.found(wanted)
        prefilled = (request.kv_transfer_params or {}).get("do_remote_prefill")
        if prefilled and found < len(wanted):
            now_s = time.monotonic()
            until_s = self._waiting_s.setdefault(request.request_id, now_s + self._options.wait_s)
            if now_s < until_s:
                return None
        return found * size

    def load(self, request: Any, blocks: list[int], tokens: int) -> None:
        """Have workers read blocks into those of the engine's cache that it has allocated."""
        assert self._form is not None
        named = self._requests[request.request_id]
        first, names = named.found
        names = names[: tokens // self._form.block_tokens]
        named.saved = max(named.saved, first + len(names))
        own = blocks[first : first + len(names)]
        self._loads[request.request_id] = list(zip(names, own, strict=True))

    def moves(self, scheduled: Any) -> _Moves:
        """Return what workers are to do in this step."""
        loads, self._loads = self._loads, {}
        reset, self._reset = self._reset, False
        moves = _Moves(dict(self._weights), loads, reset=reset)
        if not (self._gives and self._identity and self._form is not None):
            return moves
        size, state = self._form.block_tokens, scheduled.kv_connector_block_state
        fresh = {each.req_id: each.num_computed_tokens for each in scheduled.scheduled_new_reqs}
        for req_id, count in scheduled.num_scheduled_tokens.items():
            named = self._requests.get(req_id)
            blocks = state.get_block_ids(req_id) if state is not None else None
            if named is None or blocks is None:
                continue
            if req_id in fresh and not named.saved:
                named.saved = fresh[req_id] // size  # they are of an earlier request
                if self._stale and named.saved:
                    named.identity = b""
            names = self._named(named.request)[: named.computed(count) // size]
            for at in range(named.saved, len(names)):
                moves.stores.append((names[at], blocks[0][at]))
            named.saved = max(named.saved, len(names))
        return moves

    def end(self, request: Any) -> dict[str, Any] | None:
        """Forget a request; return what its client passes on, if another replica decodes."""
        self._requests.pop(request.request_id, None)
        self._waiting_s.pop(request.request_id, None)
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            return {"do_remote_prefill": True, "do_remote_decode": False}
        return None

    def reset(self) -> None:
        """Offer nothing of what was computed until now."""
        self._reset, self._stale = True, False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _WorkerHalf:
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
            self._hasher = threading.Thread(target=self._hash, name="mx-kv-digests", daemon=True)
            self._hasher.start()
        if self._takes:
            self._reader = KvReader.open(
                name,
                self._form,
                self._memory,
                peers=self._options.peers,
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

    def told(self) -> _Rank | None:
        """Return what this rank holds; None if its blocks do not move."""
        if self._form is None:
            return None
        return _Rank({self._rank: (self._name(), self._identity())}, self._form)

    def _identity(self) -> str:
        """Return the identity of the weights as they are now; "" while they change."""
        now = weights_of(self._config)[1]
        if not self._options.pin:
            return now or ""
        if self._first is None:
            self._first = now or ""
        return self._options.pin if now in (None, self._first) else now or ""

    # -- steps ------------------------------------------------------------------------------------

    def start(self, moves: _Moves) -> None:
        """Begin to read what the scheduler wants."""
        fits = moves.weights.get(self._rank, ("", ""))[1] == self._identity() != ""
        for request, blocks in moves.loads.items():
            if self._reader is None or not fits:  # the weights have changed since
                self._bad |= {number for _, number in blocks}
                self._done.add(request)
                self.counts["failed"] += len(blocks)
                continue
            self._loading[request] = self._reader.fetch(blocks), dict(blocks)

    def save(self, moves: _Moves) -> None:
        """Copy what this step has computed into the pool, and offer it."""
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
        """Offer blocks once they are hashed; on a thread of its own."""
        while (item := self._hashing.get()) is not None:
            try:
                assert self._pool is not None
                self._pool.publish(*item)
            except MxError as error:
                log.debug("a KV block is not offered: %s", error)

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

    def close(self) -> None:
        """Close what this has opened. Idempotent."""
        if self._reader is not None:
            self._reader.close()
        if self._hasher is not None:
            self._hashing.put(None)
            self._hasher.join()
            self._hasher = None
        if self._pool is not None:
            self._pool.close()
