"""CUDA graphs that travel with the weights: captured in two processes, restored in others.

    with mx.graphs.region(nbytes) as region:  # and a second process with decoys=True
        ...  # allocate weights, inputs and outputs in it, and capture
        capture = mx.graphs.export(graph, region, weights=..., inputs=..., outputs=...)
    package = mx.graphs.combine(first, second)

    graph = mx.graphs.restore(package.graph, get_image, pin=pin)  # in another process
    with mx.pull(model, into=graph.tensors()) as pull:
        ...
    if graph.prove(inputs, expected):
        graph.launch(stream)

`join` makes one package of the graphs of several sizes, which `restore_all` restores. A graph is
code: both are only for messages whose signature was checked.
"""

from mx.cuda.vmm import OccupiedError
from mx.graphs.addresses import GraphRefusedError
from mx.graphs.eager import EagerCall
from mx.graphs.export import export
from mx.graphs.merge import Package, combine, join
from mx.graphs.message import Capture, decode
from mx.graphs.package import Graph, GraphError
from mx.graphs.region import Region, region
from mx.graphs.restore import RestoredGraph, RestoredGraphs, counts, restore, restore_all
from mx.graphs.states import Cause, Reason, State
from mx.graphs.travel import FoundGraphs, Published, find, record
from mx.graphs.trial import Trial

__all__ = [
    "Capture",
    "Cause",
    "EagerCall",
    "FoundGraphs",
    "Graph",
    "GraphError",
    "GraphRefusedError",
    "OccupiedError",
    "Package",
    "Published",
    "Reason",
    "Region",
    "RestoredGraph",
    "RestoredGraphs",
    "State",
    "Trial",
    "combine",
    "counts",
    "decode",
    "export",
    "find",
    "join",
    "record",
    "region",
    "restore",
    "restore_all",
]
