"""Compares what a restored graph computes with what it has to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blake3 import blake3

from mx.cuda.device import CudaStream
from mx.graphs.calls import GraphCalls
from mx.graphs.export import replayed
from mx.graphs.package import Graph, Input
from mx.graphs.region import Region, clear_others
from mx.graphs.states import Cause, refuse
from mx.text import listed


def prove(
    driver: GraphCalls,
    executable: int,
    regions: Sequence[Region],
    graph: Graph,
    inputs: Mapping[str, bytes | memoryview],
    expected: Mapping[str, bytes | memoryview],
) -> None:
    """Replay the golden inputs, then others, and compare all outputs.

    Args:
        driver: The calls.
        executable: The instantiated graph.
        regions: The graph's memory. What is not a weight is zero before each replay, and
        afterwards.
        graph: The graph.
        inputs: Other bytes for each input, by name.
        expected: What each output has to be for them.

    Raises:
        Refusal: Some output differs, or an argument is wrong.
        CudaError: The driver fails.
    """
    unseen = _matched(graph, inputs, expected)
    outputs = [each.place for each in graph.outputs]
    device = regions[0].device
    with device.current(), CudaStream(device) as stream:
        for cause, given in ((Cause.GOLDEN, graph.inputs), (Cause.UNSEEN, unseen)):
            clear_others(regions, graph.weights)
            values = replayed(driver, executable, stream, regions, given, outputs)
            for output, value in zip(graph.outputs, values, strict=True):
                name = output.place.name
                right = (
                    blake3(value).digest() == output.digest
                    if cause is Cause.GOLDEN
                    else value == _plain(expected[name])
                )
                if not right:
                    refuse(cause, f"a replay gives other bytes of the output {name}")
        clear_others(regions, graph.weights)


def _plain(value: bytes | memoryview) -> bytes:
    return bytes(memoryview(value).cast("B"))


def _matched(
    graph: Graph,
    inputs: Mapping[str, bytes | memoryview],
    expected: Mapping[str, bytes | memoryview],
) -> list[Input]:
    """Return the inputs of a proof, which have to be complete, and others than the golden ones."""
    golden = {each.place.name: each for each in graph.inputs}
    outputs = {each.place.name: each.place for each in graph.outputs}
    for what, given, known in (("inputs", inputs, golden), ("outputs", expected, outputs)):
        if set(given) != set(known):
            refuse(Cause.OTHER, f"the {what} of the graph are {listed(sorted(known))}")
    for name, place in outputs.items():
        if len(_plain(expected[name])) != place.nbytes:
            refuse(Cause.UNSEEN, f"the output {name} has {place.nbytes} bytes")
    unseen = []
    for name, each in golden.items():
        value = _plain(inputs[name])
        if len(value) != each.place.nbytes:
            refuse(Cause.OTHER, f"the input {name} has {each.place.nbytes} bytes")
        unseen.append(Input(each.place, value))
    if golden and all(each.value == golden[each.place.name].value for each in unseen):
        refuse(Cause.UNSEEN, "the inputs are the golden ones, which prove nothing more")
    return unseen
