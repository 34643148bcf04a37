"""What people embed: `serve` on the warm side, `pull` on the new one. Blocking and async.

Both run their control side on one background loop per process, started with the first user and
stopped with the last. Nothing here needs an event loop of the caller's.
"""

from __future__ import annotations

from mx.api.listing import list_models, list_sources
from mx.api.load_tensors import load
from mx.api.observe import Observer, Overview
from mx.api.planning import plan
from mx.api.source import Source, offer, serve, source_options, start_source
from mx.api.survey import TopologyReport, topology
from mx.api.target import Pull, pull
from mx.errors import MxError
from mx.target.planning import PlannedPull
from mx.target.report import LayerEvent, Progress, PullReport

__all__ = [
    "LayerEvent",
    "MxError",
    "Observer",
    "Overview",
    "PlannedPull",
    "Progress",
    "Pull",
    "PullReport",
    "Source",
    "TopologyReport",
    "list_models",
    "list_sources",
    "load",
    "offer",
    "plan",
    "pull",
    "serve",
    "source_options",
    "start_source",
    "topology",
]
