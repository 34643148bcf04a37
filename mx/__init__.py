"""mx: peer-to-peer weight streaming for model inference.

    tensors = mx.load("llama-8b")

    source = mx.serve("/models/llama-8b", model="llama-8b")
    with mx.pull("llama-8b") as pull:
        for layer in pull.layers():
            ...
        tensors = pull.state_dict()

Each of these names imports its module on first use: `import mx` costs nothing. Those that `mx.api`
does not have are of packs (`mx.packs`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # without typing: Ctrl-C ends in a traceback while a command imports it
if TYPE_CHECKING:
    from typing import Any

    from mx.api import (
        LayerEvent,
        LocalRanks,
        MxError,
        PlannedPull,
        ProcessingKey,
        Progress,
        Pull,
        PullReport,
        Shard,
        Source,
        Subset,
        TopologyReport,
        list_models,
        list_sources,
        list_tables,
        load,
        plan,
        pull,
        serve,
        topology,
    )
    from mx.core.answers import BundleStatus
    from mx.core.estimates import Estimate
    from mx.core.replicas import EventKind, FleetEvent, Replica, ReplicaState
    from mx.fleet import (
        BroadcastReport,
        Cache,
        Router,
        broadcast,
        cache,
        cached,
        list_bundles,
        wait_for_bundle,
        wait_for_bundle_async,
    )

__version__ = "0.1.0"

#: Modules that are attributes of `mx`, too.
_MODULES = ("artifacts", "config", "engines", "errors", "graphs", "metrics", "stores")

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
    import importlib.util

    if name in _MODULES:
        return importlib.import_module(f"mx.{name}")
    # A submodule is not an attribute until it is imported; all else may be a pack's.
    if name not in __all__ and (name.startswith("_") or importlib.util.find_spec(f"mx.{name}")):
        raise AttributeError(f"module 'mx' has no attribute {name!r}")
    value = getattr(importlib.import_module("mx.api"), name)
    if name in __all__:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    from mx import packs

    of_packs = [n for pack in packs.packs().values() for n in (*pack.names, *pack.modules)]
    return sorted({*__all__, *_MODULES, *of_packs})
