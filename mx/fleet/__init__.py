"""What routers, caches and trainers use: `Router`, `cache`, `broadcast`, bundles.

Each name imports its module on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mx import config_values as values
from mx.config_values import SettingDescription
from mx.packs import Pack

if TYPE_CHECKING:
    from mx.fleet.broadcasting import BroadcastReport, broadcast
    from mx.fleet.bundles import list_bundles, wait_for_bundle, wait_for_bundle_async
    from mx.fleet.caching import Cache, cache, cached
    from mx.fleet.offering import ask_offered, offer, pull_offered
    from mx.fleet.router import Router
    from mx.fleet.router_watch import Watch

PACK = Pack(
    names={
        "BroadcastReport": "mx.fleet.broadcasting",
        "BundleStatus": "mx.core.answers",
        "Cache": "mx.fleet.caching",
        "Estimate": "mx.core.estimates",
        "EventKind": "mx.core.replicas",
        "FleetEvent": "mx.core.replicas",
        "Replica": "mx.core.replicas",
        "ReplicaState": "mx.core.replicas",
        "Router": "mx.fleet.router",
        "broadcast": "mx.fleet.broadcasting",
        "cache": "mx.fleet.caching",
        "cached": "mx.fleet.caching",
        "list_bundles": "mx.fleet.bundles",
        "wait_for_bundle": "mx.fleet.bundles",
        "wait_for_bundle_async": "mx.fleet.bundles",
    },
    verbs={"cache": "mx.fleet.verbs:cache"},
    additions={
        "serve": "mx.fleet.additions:CACHE",
        "models": "mx.fleet.additions:BUNDLES",
        "web": "mx.fleet.additions:HTTP",
    },
    settings={
        "cache_memory": SettingDescription(
            0,
            values.size,
            "With `cache`: what all models together may have, like 64GB.",
            metavar="SIZE",
            flag="memory",
            unset="half of what is free",
        ),
    },
    takes={"cache": ("cache_socket",), "serve": ("cache_memory",)},
)

__all__ = [
    "BroadcastReport",
    "Cache",
    "Router",
    "Watch",
    "ask_offered",
    "broadcast",
    "cache",
    "cached",
    "list_bundles",
    "offer",
    "pull_offered",
    "wait_for_bundle",
    "wait_for_bundle_async",
]

#: What other packs use, and `mx` does not name.
_HOMES = {
    **PACK.names,
    "Watch": "mx.fleet.router_watch",
    "ask_offered": "mx.fleet.offering",
    "offer": "mx.fleet.offering",
    "pull_offered": "mx.fleet.offering",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mx.fleet' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
