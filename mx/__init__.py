"""mx: peer-to-peer weight streaming for model inference.

    tensors = mx.load("llama-8b")

    source = mx.serve("/models/llama-8b", model="llama-8b")
    with mx.pull("llama-8b") as pull:
        for layer in pull.layers():
            ...
        tensors = pull.state_dict()

Each of these names imports its module on first use, so that `import mx` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.api import (
        BundleStatus,
        Estimate,
        EventKind,
        FleetEvent,
        LayerEvent,
        LocalRanks,
        PlannedPull,
        ProcessingKey,
        Progress,
        Pull,
        PullReport,
        Replica,
        ReplicaState,
        Router,
        Shard,
        Source,
        Subset,
        TopologyReport,
        list_bundles,
        list_models,
        list_sources,
        list_tables,
        load,
        plan,
        pull,
        serve,
        topology,
        wait_for_bundle,
        wait_for_bundle_async,
    )
    from mx.api.broadcasting import BroadcastReport, broadcast
    from mx.api.caching import Cache, cache, cached
    from mx.errors import MxError

__version__ = "0.1.0"

_HOMES = {
    "BroadcastReport": "mx.api.broadcasting",
    "BundleStatus": "mx.core.answers",
    "Cache": "mx.api.caching",
    "Estimate": "mx.core.estimates",
    "EventKind": "mx.core.replicas",
    "FleetEvent": "mx.core.replicas",
    "LayerEvent": "mx.target.report",
    "LocalRanks": "mx.core.local_ranks",
    "MxError": "mx.errors",
    "PlannedPull": "mx.api.planning",
    "ProcessingKey": "mx.core.variant",
    "Progress": "mx.core.progress",
    "Pull": "mx.api.target",
    "PullReport": "mx.target.report",
    "Replica": "mx.core.replicas",
    "ReplicaState": "mx.core.replicas",
    "Router": "mx.api.router",
    "Shard": "mx.core.selection",
    "Source": "mx.api.source",
    "Subset": "mx.core.selection",
    "TopologyReport": "mx.api.survey",
    "broadcast": "mx.api.broadcasting",
    "cache": "mx.api.caching",
    "cached": "mx.api.caching",
    "list_bundles": "mx.api.bundles",
    "list_models": "mx.api.listing",
    "list_sources": "mx.api.listing",
    "list_tables": "mx.api.tables",
    "load": "mx.api.load_tensors",
    "plan": "mx.api.planning",
    "pull": "mx.api.pulling",
    "serve": "mx.api.serving",
    "topology": "mx.api.survey",
    "wait_for_bundle": "mx.api.bundles",
    "wait_for_bundle_async": "mx.api.bundles",
}

#: Modules that are attributes of `mx`, too.
_MODULES = ("artifacts", "config", "engines", "errors", "graphs", "metrics")

__all__ = [
    "BroadcastReport",
    "BundleStatus",
    "Cache",
    "Estimate",
    "EventKind",
    "FleetEvent",
    "LayerEvent",
    "LocalRanks",
    "MxError",
    "PlannedPull",
    "ProcessingKey",
    "Progress",
    "Pull",
    "PullReport",
    "Replica",
    "ReplicaState",
    "Router",
    "Shard",
    "Source",
    "Subset",
    "TopologyReport",
    "__version__",
    "broadcast",
    "cache",
    "cached",
    "list_bundles",
    "list_models",
    "list_sources",
    "list_tables",
    "load",
    "plan",
    "pull",
    "serve",
    "topology",
    "wait_for_bundle",
    "wait_for_bundle_async",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mx.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mx' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
