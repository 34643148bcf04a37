"""The API that programs embed: `serve` where the weights are, `pull` where they are needed.

Both have blocking and async forms. Their control side runs on one background loop per process,
which starts with the first user and stops with the last: the caller needs no event loop. Each name
imports its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.api.broadcasting import BroadcastReport, broadcast
    from mx.api.bundles import list_bundles, wait_for_bundle, wait_for_bundle_async
    from mx.api.caching import Cache, cache, cached
    from mx.api.listing import list_models, list_sources
    from mx.api.load_tensors import load
    from mx.api.observe import Observer, Overview
    from mx.api.planning import PlannedPull, plan
    from mx.api.pulling import pull
    from mx.api.router import Router
    from mx.api.router_watch import Watch
    from mx.api.serving import offer, serve, source_options, start_source
    from mx.api.source import Source
    from mx.api.survey import TopologyReport, topology
    from mx.api.tables import PlacedTensor, SourceTable, list_tables
    from mx.api.target import Pull
    from mx.core.answers import BundleStatus
    from mx.core.estimates import Estimate
    from mx.core.local_ranks import LocalRanks
    from mx.core.progress import Progress
    from mx.core.replicas import EventKind, FleetEvent, Replica, ReplicaState
    from mx.core.selection import Shard, Subset
    from mx.core.variant import ProcessingKey
    from mx.errors import MxError
    from mx.target.report import LayerEvent, PullReport

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
    "Observer": "mx.api.observe",
    "Overview": "mx.api.observe",
    "PlacedTensor": "mx.api.tables",
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
    "SourceTable": "mx.api.tables",
    "Subset": "mx.core.selection",
    "TopologyReport": "mx.api.survey",
    "Watch": "mx.api.router_watch",
    "broadcast": "mx.api.broadcasting",
    "cache": "mx.api.caching",
    "cached": "mx.api.caching",
    "list_bundles": "mx.api.bundles",
    "list_models": "mx.api.listing",
    "list_sources": "mx.api.listing",
    "list_tables": "mx.api.tables",
    "load": "mx.api.load_tensors",
    "offer": "mx.api.serving",
    "plan": "mx.api.planning",
    "pull": "mx.api.pulling",
    "serve": "mx.api.serving",
    "source_options": "mx.api.serving",
    "start_source": "mx.api.serving",
    "topology": "mx.api.survey",
    "wait_for_bundle": "mx.api.bundles",
    "wait_for_bundle_async": "mx.api.bundles",
}

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
    "Observer",
    "Overview",
    "PlacedTensor",
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
    "SourceTable",
    "Subset",
    "TopologyReport",
    "Watch",
    "broadcast",
    "cache",
    "cached",
    "list_bundles",
    "list_models",
    "list_sources",
    "list_tables",
    "load",
    "offer",
    "plan",
    "pull",
    "serve",
    "source_options",
    "start_source",
    "topology",
    "wait_for_bundle",
    "wait_for_bundle_async",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mx.api' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
