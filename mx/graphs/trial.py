"""A publisher's trial of bytes of kernels' parameters that seem not to be read.

A child process restores the graph at its addresses, over copies of the weights and a guard around
each region, and replays it with the bytes as both processes captured them, and with 0x00, 0xff and
random bytes there, one kernel after the other, over several inputs. All of each region and of its
guard has to be the same after each replay. A process that serves never does this.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mx.errors import ConfigError
from mx.graphs.addresses import GraphRefusedError
from mx.graphs.message import encode
from mx.graphs.package import Graph, KernelNode, Node, TriedBytes
from mx.text import listed, shown

#: What a child runs. It imports mx as this process does, and ends with it.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mx.graphs.trying import main
main(sys.argv[2])
"""
_LEAST_INPUTS = 2
_RANDOM_ROUNDS = 2
_KILLED_S = 30
_POLL_S = 0.5

Buffers = Mapping[str, bytes | memoryview]


@dataclass(frozen=True)
class Trial:
    """What a publisher gives to vouch for bytes by a trial.

    Attributes:
        weights: The bytes of all weights, by name, in host memory: they are copied.
        inputs: Sets of inputs besides the golden ones, two at least, by name: as unlike each other
            as those that replicas will have.
        libraries: The files of libraries that the graph's kernels are of.
        calls: "MODULE:FUNCTION", which returns the eager calls that load the graph's kernels: the
            child imports it.
        device: The GPU, "cuda:N", "cuda:GPU-..." or N, with room for the regions.
        patience_s: The longest that starting the child, or one replay, may take, in seconds.
    """

    weights: Buffers = field(repr=False)
    inputs: Sequence[Buffers] = field(repr=False)
    libraries: Sequence[Path] = ()
    calls: str = ""
    device: int | str = 0
    patience_s: float = 120


def try_bytes(
    trial: Trial,
    graph: Graph,
    others: Sequence[Node],
    free: Sequence[TriedBytes],
    images: Mapping[str, bytes],
) -> Graph:
    """Return a graph with zeros for bytes that a trial shows to make no difference.

    Args:
        trial: What the publisher gives.
        graph: The graph, with the bytes of one capture.
        others: Its nodes with those of the other one.
        free: The bytes.
        images: The graph's images, by their blake3 in hexadecimal.

    Raises:
        GraphRefusedError: A replay fails, hangs, or differs; the message names the kernel.
        ConfigError: Weights or inputs are absent, or have another length.
    """
    _check(trial, graph)
    zeros = replace(_filled(graph, free, lambda span: bytes(span.nbytes)), tried=tuple(free))
    variants = [("as captured", graph), *_variants(graph, others, free), ("0x00", zeros)]
    with tempfile.TemporaryDirectory(prefix="mx-trial-") as name:
        folder = Path(name)
        _write(folder, trial, graph, images, [made for _, made in variants])
        at, failed = _run(folder, trial)
    if failed:
        last = len(variants) * (1 + len(trial.inputs)) - 1
        variant, given = divmod(min(at, last), 1 + len(trial.inputs))
        raise GraphRefusedError(
            f"a trial of bytes that differ fails with {variants[variant][0]}, input {given}: "
            f"{shown(failed)}",
            hint="capture here: these bytes are read, or mx can't tell",
        )
    return zeros


def _check(trial: Trial, graph: Graph) -> None:
    golden = {each.place.name: each for each in graph.inputs}
    if golden and len(trial.inputs) < _LEAST_INPUTS:
        raise ConfigError(
            f"a trial of {len(trial.inputs)} inputs besides the golden ones shows too little",
            hint=f"give {_LEAST_INPUTS} or more, as unlike as possible",
        )
    sizes = {place.name: place.nbytes for place in graph.weights}
    inputs = {name: each.place.nbytes for name, each in golden.items()}
    for what, given, known in (
        ("weights", trial.weights, sizes),
        *(("inputs", each, inputs) for each in trial.inputs),
    ):
        if {name: memoryview(value).nbytes for name, value in given.items()} != known:
            raise ConfigError(
                f"the {what} of the trial are not the graph's",
                hint=f"give all bytes of {listed(sorted(known))}",
            )
    called = [kernel.name for kernel in graph.kernels if kernel.call is not None]
    if called and not trial.calls:
        raise ConfigError(
            f"the trial has no call that loads {called[0]}",
            hint="name a function that returns the calls: `calls`",
        )


def _filled(graph: Graph, free: Sequence[TriedBytes], fill: Callable[[TriedBytes], bytes]) -> Graph:
    nodes = list(graph.nodes)
    for span in free:
        node = nodes[span.node]
        assert isinstance(node, KernelNode)
        value = bytearray(node.values)
        value[span.offset : span.offset + span.nbytes] = fill(span)
        nodes[span.node] = replace(node, values=bytes(value))
    return replace(graph, nodes=tuple(nodes))


def _variants(
    graph: Graph, others: Sequence[Node], free: Sequence[TriedBytes]
) -> Iterator[tuple[str, Graph]]:
    """Yield (what is tried, graph), one kernel after the other."""
    draw = random.Random(0)
    kernels: dict[int, list[TriedBytes]] = {}
    for span in free:
        node = graph.nodes[span.node]
        assert isinstance(node, KernelNode)
        kernels.setdefault(node.kernel, []).append(span)

    def other(span: TriedBytes) -> bytes:
        node = others[span.node]
        assert isinstance(node, KernelNode)
        return node.values[span.offset : span.offset + span.nbytes]

    fills = {
        "those of the other capture": other,
        "0x00": lambda span: bytes(span.nbytes),
        "0xff": lambda span: b"\xff" * span.nbytes,
        **{
            f"random bytes {n}": lambda span: draw.randbytes(span.nbytes)
            for n in range(_RANDOM_ROUNDS)
        },
    }
    for kernel, spans in kernels.items():
        offsets = graph.kernels[kernel].parameters
        at = spans[0].offset
        number = max(n for n, (offset, _) in enumerate(offsets) if offset <= at)
        where = f"parameter {number}, byte {at - offsets[number][0]} of node {spans[0].node}"
        for what, fill in fills.items():
            text = f"{what} in kernel {graph.kernels[kernel].name} ({where})"
            yield text, _filled(graph, spans, fill)


def _write(
    folder: Path,
    trial: Trial,
    graph: Graph,
    images: Mapping[str, bytes],
    variants: Sequence[Graph],
) -> None:
    """Write what a child reads."""
    for index, variant in enumerate(variants):
        (folder / f"graph-{index}").write_bytes(encode(variant))
    for digest, image in images.items():
        (folder / digest).write_bytes(image)
    with (folder / "weights").open("wb") as file:
        for place in graph.weights:
            file.write(trial.weights[place.name])
    for index, given in enumerate(trial.inputs):
        with (folder / f"input-{index + 1}").open("wb") as file:
            for each in graph.inputs:
                file.write(given[each.place.name])
    job = {
        "variants": len(variants),
        "inputs": len(trial.inputs),
        "device": f"cuda:{trial.device}" if isinstance(trial.device, int) else trial.device,
        "libraries": [str(path.absolute()) for path in trial.libraries],
        "calls": trial.calls,
    }
    (folder / "job").write_text(json.dumps(job))


def _run(folder: Path, trial: Trial) -> tuple[int, str]:
    """Run a child. Return the number of its last replay, and why it failed, "" if it did not."""
    said, errors = folder / "said", folder / "errors"
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), str(folder)]
    with said.open("wb") as out, errors.open("wb") as err:
        # Nothing is written to its input: the end of that says that this process has ended.
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
    failed = ""
    try:
        size, since_s = -1, time.monotonic()
        while child.poll() is None and not failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
            if size != (size := said.stat().st_size):
                since_s = time.monotonic()
            elif time.monotonic() - since_s > trial.patience_s:
                failed = f"a replay does not end within {trial.patience_s:g} s"
    finally:
        child.kill()
        assert child.stdin is not None
        child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a GPU may hold it for long
            child.wait(_KILLED_S)
    if child.returncode and not failed:
        lines = errors.read_text(errors="replace").strip().splitlines()
        failed = lines[-1] if lines else f"the child ended with {child.returncode}"
    return max(0, said.stat().st_size - 1), failed
