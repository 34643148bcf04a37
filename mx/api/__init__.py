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

#: Where each name is.
_HOMES = {
    "mx.api.broadcasting": ("BroadcastReport", "broadcast"),
    "mx.api.bundles": ("list_bundles", "wait_for_bundle", "wait_for_bundle_async"),
    "mx.api.caching": ("Cache", "cache", "cached"),
    "mx.api.listing": ("list_models", "list_sources"),
    "mx.api.load_tensors": ("load",),
    "mx.api.observe": ("Observer", "Overview"),
    "mx.api.planning": ("PlannedPull", "plan"),
    "mx.api.pulling": ("pull",),
    "mx.api.router": ("Router",),
    "mx.api.router_watch": ("Watch",),
    "mx.api.serving": ("offer", "serve", "source_options", "start_source"),
    "mx.api.source": ("Source",),
    "mx.api.survey": ("TopologyReport", "topology"),
    "mx.api.tables": ("PlacedTensor", "SourceTable", "list_tables"),
    "mx.api.target": ("Pull",),
    "mx.core.answers": ("BundleStatus",),
    "mx.core.estimates": ("Estimate",),
    "mx.core.local_ranks": ("LocalRanks",),
    "mx.core.progress": ("Progress",),
    "mx.core.replicas": ("EventKind", "FleetEvent", "Replica", "ReplicaState"),
    "mx.core.selection": ("Shard", "Subset"),
    "mx.core.variant": ("ProcessingKey",),
    "mx.errors": ("MxError",),
    "mx.target.report": ("LayerEvent", "PullReport"),
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
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'mx.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
