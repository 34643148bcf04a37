"""CUDA graphs that travel with the weights: captured in two processes, restored in others.

    with mx.graphs.region(nbytes) as region:  # and a second process with shifted=True
        ...  # allocate weights, inputs and outputs in it, and capture
        capture = mx.graphs.export(graph, region, weights=..., inputs=..., outputs=...)
    package = mx.graphs.combine(first, second)

    graph = mx.graphs.restore(package.graph, get_image, pin=pin)  # in another process
    with mx.pull(model, into=graph.tensors()) as pull:
        ...
    if graph.prove(inputs, expected):
        graph.launch(stream)

A graph is code: `restore` is only for messages whose signature was checked.
"""

from mx.cuda.vmm import OccupiedError
from mx.graphs.eager import EagerCall
from mx.graphs.export import Package, combine, export
from mx.graphs.message import Capture, decode
from mx.graphs.package import Graph, GraphError
from mx.graphs.pointers import GraphRefusedError
from mx.graphs.region import Region, region
from mx.graphs.restore import RestoredGraph, counts, restore
from mx.graphs.states import Cause, Reason, State
from mx.graphs.travel import FoundGraphs, Published, find, record

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
    "State",
    "combine",
    "counts",
    "decode",
    "export",
    "find",
    "record",
    "region",
    "restore",
]
