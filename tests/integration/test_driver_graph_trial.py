"""Trials of bytes that seem not to be read, over the stand-in driver."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mx.graphs.message import decode
from mx.graphs.package import KernelNode
from tests.support.driver.layer_programs import runs
from tests.support.driver.programs import each_major_at_leisure

pytestmark = [pytest.mark.integration, each_major_at_leisure]

#: Captures the layer with one more kernel, for each kernel with a tail.
_CAPTURES = """
from mx.errors import ConfigError
from mx.graphs import Capture, GraphRefusedError, Trial, combine

folder, decoys = Path({folder!r}), {decoys}
tails = Kernels("tails")
with mx.graphs.region(REGION_BYTES, decoys=decoys) as region:
    layer = Layer(region)
    kernels = layer.kernels
    kernels.functions |= tails.functions
    kernels.images |= tails.images
    zero, extra = region.allocate(512), region.allocate(4 * N)
    tail = 0x0203 if decoys else 0x0101
    captures = {{}}

    def exports(label, name, images, calls=()):
        layer.fill(values(1), vector(7))
        more = lambda s: kernels.launch(s, name, layer.address["x"], zero, extra, N, tail)
        captures[label] = mx.graphs.export(
            layer.capture(more),
            region,
            weights=layer.weights(),
            inputs={{"x": layer.tensors["x"]}},
            outputs={{"out": layer.tensors["out"]}},
            images=images,
            calls=calls,
            pin="pin-1",
        )
        (folder / f"{{label}}.{{int(decoys)}}").write_bytes(captures[label].to_bytes())

    exports("called", "tail_skipped", kernels.given("norm", "add", "matvec"), tail_calls(tails))
    for name in sorted(tails.functions):
        exports(name, name, kernels.given())
"""
#: Joins what another process and this one captured: in this one, which lives on.
_JOINS = """
    large = np.full(N, 1000, np.float32).tobytes()
    given = dict(weights={n: v.tobytes() for n, v in values(1).items()}, patience_s=25)
    inputs = [{"x": vector(8)}, {"x": large}]

    def joins(name, label, **trial):
        first = Capture.from_bytes((folder / f"{name}.0").read_bytes())
        try:
            package = combine(first, captures[name], **trial)
        except (GraphRefusedError, ConfigError) as error:
            print(json.dumps([label, f"{type(error).__name__}: {error}"]), flush=True)
        else:
            print(json.dumps([label, ""]), flush=True)
            (folder / f"graph-{label}").write_bytes(package.graph)
            for digest, image in package.images.items():
                (folder / digest).write_bytes(image)

    joins("tail_skipped", "no trial")
    joins("tail_skipped", "few inputs", trial=Trial(inputs=inputs[:1], **given))
    joins("tail_skipped", "short input", trial=Trial(inputs=[inputs[0], {"x": b""}], **given))
    zeros = {n: bytes(len(v)) for n, v in given["weights"].items()}
    joins("tail_skipped", "weights", trial=Trial(zeros, inputs, patience_s=25))
    for name in captures:
        joins(name, name, trial=Trial(inputs=inputs, **given))
    own = "tests.support.driver.layer:tail_calls"
    joins("called", "its own calls", trial=Trial(inputs=inputs, calls=own, **given))
    joins("tail_read", "small inputs", trial=Trial(inputs=[{"x": vector(9)}] * 2, **given))
    layer.fill(values(1), vector(7))
    print(json.dumps(["alive", is_right(values(1), vector(8), layer.eager(vector(8)))]))
"""
_RESTORES = """
folder = Path({folder!r})
with mx.graphs.restore(
    (folder / "graph-tail_skipped").read_bytes(), lambda d: (folder / d).read_bytes(), pin="pin-1"
) as graph:
    weights = values(1)
    for each, tensor in graph.tensors().items():
        call("cuMemcpyHtoD", tensor.address, weights[each].tobytes(), tensor.nbytes)
    with mx.graphs.region(REGION_BYTES, base=OWN_BASE) as own:
        eager = Layer(own)
        eager.fill(weights, vector(0))
        expected = eager.eager(vector(8))
    print(graph.prove({{"x": vector(8)}}, {{"out": expected}}), graph.reason or "")
"""


@pytest.mark.slow
def test_only_bytes_that_change_nothing_travel_as_zeros(major: int, tmp_path: Path) -> None:
    """A kernel that reads its tail for large tokens, one that writes outside the region, one that
    loops, and one that faults: each is refused by name, and the exporting process lives."""
    runs(major, _CAPTURES.format(folder=str(tmp_path), decoys=False))
    code = _CAPTURES.format(folder=str(tmp_path), decoys=True) + _JOINS
    said = dict(json.loads(line) for line in runs(major, code))
    assert "kernel tail_skipped: parameter 4 differs, and mx does not know" in said["no trial"]
    assert "shows too little" in said["few inputs"]
    assert "the inputs of the trial are not the graph's" in said["short input"]
    assert "the trial's weights or libraries are not those" in said["weights"]
    assert said["tail_skipped"] == said["its own calls"] == ""
    assert "the trial has no call that loads tail_skipped" in said["called"]
    expected = {
        "tail_read": "input 2: '.*memory differs afterwards",
        "tail_writes": "0x00 in kernel tail_writes .*: '.*memory outside the region was written",
        "tail_loops": "0xff in kernel tail_loops .*: 'a replay does not end within 25 s",
        "tail_faults": "0x00 in kernel tail_faults .*: .*ILLEGAL_ADDRESS",
    }
    for name, says in expected.items():
        assert f"in kernel {name} (parameter 4, byte 0 of node" in said[name]
        assert re.search(says, said[name]), said[name]
    assert said["small inputs"] == ""  # what a trial shows is as good as its inputs
    assert said["alive"] is True
    assert runs(major, _RESTORES.format(folder=str(tmp_path))) == ["True "]
    (graph,) = decode((tmp_path / "graph-tail_skipped").read_bytes())
    (tried,) = graph.tried
    node = graph.nodes[tried.node]
    assert isinstance(node, KernelNode) and graph.kernels[node.kernel].name == "tail_skipped"
    assert tried.nbytes <= 4 and tried.offset == graph.kernels[node.kernel].parameters[4][0]
    assert not any(node.values[tried.offset : tried.offset + 4])
