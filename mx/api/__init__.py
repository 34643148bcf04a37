"""The API that programs embed: `serve` where the weights are, `pull` where they are needed.

Both have blocking and async forms. Their control side runs on one background loop per process,
which starts with the first user and stops with the last: the caller needs no event loop. Each name
imports its module on first use; those of packs are attributes, too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mx.api.listing import list_models, list_sources
    from mx.api.planning import PlannedPull, plan
    from mx.api.pulling import load, pull
    from mx.api.serving import offer, serve, source_options, start_source
    from mx.api.source import Source
    from mx.api.survey import TopologyReport, topology
    from mx.api.tables import PlacedTensor, SourceTable, list_tables
    from mx.api.target import Pull
    from mx.core.local_ranks import LocalRanks
    from mx.core.progress import Progress
    from mx.core.selection import Shard, Subset
    from mx.core.variant import ProcessingKey
    from mx.errors import MxError
    from mx.fetching.report import LayerEvent, PullReport

#: Where each name is.
_HOMES = {
    "mx.api.listing": ("list_models", "list_sources"),
    "mx.api.planning": ("PlannedPull", "plan"),
    "mx.api.pulling": ("load", "pull"),
    "mx.api.serving": ("offer", "serve", "source_options", "start_source"),
    "mx.api.source": ("Source",),
    "mx.api.survey": ("TopologyReport", "topology"),
    "mx.api.tables": ("PlacedTensor", "SourceTable", "list_tables"),
    "mx.api.target": ("Pull",),
    "mx.core.local_ranks": ("LocalRanks",),
    "mx.core.progress": ("Progress",),
    "mx.core.selection": ("Shard", "Subset"),
    "mx.core.variant": ("ProcessingKey",),
    "mx.errors": ("MxError",),
    "mx.fetching.report": ("LayerEvent", "PullReport"),
}

__all__ = [
    "LayerEvent",
    "LocalRanks",
    "MxError",
    "PlacedTensor",
    "PlannedPull",
    "ProcessingKey",
    "Progress",
    "Pull",
    "PullReport",
    "Shard",
    "Source",
    "SourceTable",
    "Subset",
    "TopologyReport",
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
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    return importlib.import_module("mx.packs").attribute(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
