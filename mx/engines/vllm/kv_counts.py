"""What the connector for KV blocks counts, in vLLM's log and at its `/metrics`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

#: Blocks that came and were right; that did not come or were wrong, so that the engine computed
#: them; that were copied into the pool; and that had no place there.
WHATS = ("loaded", "failed", "stored", "not stored")


class KvCounts(KVConnectorStats):  # type: ignore[misc]
    """Blocks since the last step, by what became of them."""

    def reset(self) -> None:
        self.data = dict.fromkeys(WHATS, 0)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KvCounts(dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return {f"KV blocks {what}": self.data.get(what, 0) for what in WHATS}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters of `KvCounts`, in all."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._blocks = metric_types[prometheus_client.Counter](
            name="mx_kv_blocks",
            documentation="KV blocks, by what became of them: loaded, failed, stored, not stored.",
            labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for what, count in transfer_stats_data.items():
            self._blocks.labels(*labels, what).inc(count)
