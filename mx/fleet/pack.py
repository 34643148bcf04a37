"""What the fleet pack adds to mx: the router, the host's cache, broadcasts and bundles."""

from __future__ import annotations

from mx import config_values as values
from mx.config_values import SettingDescription
from mx.packs import Pack

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
        "serve": "mx.fleet.verbs:CACHE",
        "models": "mx.fleet.verbs:BUNDLES",
        "web": "mx.fleet.verbs:HTTP",
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
