"""vLLM's connector for KV blocks: `kv_connector="MxConnector"` by the path of this module.

The scheduler's half names the blocks of requests and finds them in the pools of other replicas; the
workers' half reads them into the engine's cache, verified, and copies what was computed into a pool
of its own. docs/kv.md says how it is configured.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
)

from mx import namekey
from mx.engines.replica.logs import logger_of
from mx.engines.vllm.kv_counts import KvCounts, KvMetrics
from mx.engines.vllm.kv_names import NamedRequest, whole_prefix
from mx.engines.vllm.kv_worker import ConnectorOptions, KvMoves, KvWorker, RankWeights
from mx.errors import ConfigError, MxError
from mx.kv import KvKey, KvReader, secret_of
from mx.log import event

log = logger_of("vLLM")


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
        half = KvScheduler if role is KVConnectorRole.SCHEDULER else KvWorker
        self._half: Any = half(vllm_config, options)
        self.counts: Counter[str] = Counter()  # of all steps

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

    def build_connector_meta(self, scheduler_output: Any) -> KvMoves:
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

    def get_handshake_metadata(self) -> RankWeights | None:
        return self._half.told()  # type: ignore[no-any-return]

    def build_connector_worker_meta(self) -> RankWeights | None:
        return self._half.told()  # type: ignore[no-any-return]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del kwargs
        moves = self._get_connector_metadata()
        assert isinstance(moves, KvMoves)
        self._half.start(moves, computes=forward_context.attn_metadata is not None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are computed once their blocks are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy this layer of the blocks that the step computes, while it computes others."""
        moves = self._get_connector_metadata()
        assert isinstance(moves, KvMoves)
        self._half.save_layer(layer_name, moves)

    def wait_for_save(self) -> None:
        moves = self._get_connector_metadata()
        assert isinstance(moves, KvMoves)
        self._half.save(moves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        del finished_req_ids
        return None, self._half.finished() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._half.failed()  # type: ignore[no-any-return]

    def get_kv_connector_stats(self) -> KvCounts | None:
        counts = getattr(self._half, "counts", None)
        if not counts or not any(counts.values()):
            return None
        found = KvCounts(dict(counts))
        self.counts.update(counts)
        counts.clear()
        return found

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvCounts | None:
        return KvCounts(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> KvMetrics:
        return KvMetrics(*given)

    def shutdown(self) -> None:
        self._half.close()


class KvScheduler:
    """Names blocks, finds them, and says which are read and given."""

    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self._options, self._ranks = options, vllm_config.parallel_config.world_size
        self._folders = options.folders(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self._gives, self._takes = transfer.is_kv_producer, transfer.is_kv_consumer
        self._weights: dict[int, tuple[str, str]] = {}
        self._form: KvKey | None = None
        self._identity = b""  # of the weights of all ranks; b"": not known, or changing
        self._secret = b""
        self._reader: KvReader | None = None
        self._requests: dict[str, NamedRequest] = {}
        self._waiting_s: dict[str, float] = {}  # by request, until when it waits for its blocks
        self._waits = False  # in this step one does
        self._loads: dict[str, list[tuple[bytes, int]]] = {}
        self._stale = False  # what the engine's own cache holds may be of earlier weights
        self._reset = False
        self._said = ""

    def hear(self, told: RankWeights) -> None:
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
                    files=self._folders,
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
        if self._requests[request.request_id].took:
            return 0  # once is enough: what came wrong is computed
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
                self._waits = True
                return None
        return found * size

    def load(self, request: Any, blocks: list[int], tokens: int) -> None:
        """Have workers read blocks into those of the engine's cache that it has allocated."""
        assert self._form is not None
        named = self._requests[request.request_id]
        named.took = True
        first, names = named.found
        names = names[: tokens // self._form.block_tokens]
        named.saved = max(named.saved, first + len(names))
        own = blocks[first : first + len(names)]
        self._loads[request.request_id] = list(zip(names, own, strict=True))

    def moves(self, scheduled: Any) -> KvMoves:
        """Return what workers are to do in this step."""
        loads, self._loads = self._loads, {}
        reset, self._reset = self._reset, False
        waits, self._waits = self._waits, False
        moves = KvMoves(dict(self._weights), loads, reset=reset, waiting=waits)
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
                before = names[at - 1] if at else b""
                moves.stores.append((names[at], blocks[0][at], before))
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
        """List nothing of what was computed until now."""
        self._reset, self._stale = True, False

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
