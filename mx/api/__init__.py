"""The API that programs embed: `serve` where the weights are, `pull` where they are needed.

Both have blocking and async forms. Their control side runs on one background loop per process,
which starts with the first user and stops with the last: the caller needs no event loop.
"""

from __future__ import annotations

from mx.api.bundles import list_bundles, wait_for_bundle, wait_for_bundle_async
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

__all__ = [
    "BundleStatus",
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
