"""Measures whole pulls into and out of a GPU beside safetensors' own load of the same checkpoint.

    PYTHONPATH=.:transports python -m benchmarks.gpu_pull [--rounds 3] [--gb 4] [--folder .bench]

Two sources of the checkpoint, `mx serve` on the host and on the GPU, are processes of their own. A
pull is timed from the call until each layer is verified, in a process that has pulled before. The
reference reads the files from the page cache to the same device, and verifies nothing; it needs
torch. One GPU is enough.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mx
from mx.cuda import driver as cuda
from mx.errors import MxError
from mx.transport import Unavailable

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .processes import Cluster

MODEL, GPU = "llama", "cuda:0"
#: From, to, by which transport, and whether the source's memory is attached.
CASES = [
    (GPU, GPU, "cuda_ipc", True),
    (GPU, GPU, "cuda_ipc", False),
    ("cpu", GPU, "pcie_p2p", False),
    ("cpu", GPU, "shm", False),
    ("cpu", GPU, "tcp", False),
    ("cpu", GPU, "ucx", False),
    (GPU, GPU, "tcp", False),
    (GPU, GPU, "ucx", False),
    (GPU, "cpu", "pcie_p2p", False),
    (GPU, "cpu", "tcp", False),
]


def name_of(case: tuple[str, str, str, bool]) -> str:
    """Return a row's name: "host to GPU by tcp"."""
    source, target, transport, attach = case
    ends = [{"cpu": "host"}.get(each, "GPU") for each in (source, target)]
    return f"{' to '.join(ends)} by {transport}{', attached' if attach else ''}"


def pulled(endpoints: Mapping[str, str], case: tuple[str, str, str, bool]) -> float:
    """Pull once from the source on a device, and return the seconds until all is verified."""
    source, target, transport, attach = case
    began_s = time.perf_counter()
    with mx.pull(
        MODEL, peer=endpoints[source], device=target, transport=transport, attach=attach
    ) as pull:
        report = pull.wait(300)
        seconds = time.perf_counter() - began_s
    assert [path.attached for path in report.paths] == [attach], report.paths
    return seconds


def loadable(device: str) -> bool:
    """Whether torch is there and can use a device."""
    try:
        import torch
    except ImportError:
        return False
    return device == "cpu" or torch.cuda.is_available()


def loaded(folder: Path, device: str) -> float:
    """Load the checkpoint by safetensors, and return the seconds."""
    import torch
    from safetensors.torch import load_file

    began_s = time.perf_counter()
    state: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file, device=device)
    if device == "cpu":  # mapped so far
        state = {name: tensor.clone() for name, tensor in state.items()}
    else:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def run(folder: Path, nbytes: int, rounds: int, only: str = "") -> list[harness.Row]:
    """Measure and return all rows.

    Args:
        folder: Where the checkpoint is kept.
        nbytes: About how many bytes it has.
        rounds: Interleaved rounds.
        only: A regular expression that the names of the rows have.
    """
    layers = max(1, nbytes // (2 * 4096 * (4 * 4096 + 3 * 11008)))
    folder = folder / f"llama-{layers}"
    path = folder / "model.safetensors"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(path, llama_shapes(layers, 4096, 11008, 4096))
    size = path.stat().st_size
    cluster = Cluster()
    try:
        endpoints = {}
        for device in ("cpu", GPU):
            began_s = time.perf_counter()
            _, said = cluster.serve(folder, MODEL, "--device", device)
            endpoints[device] = said["endpoint"]
            harness.say(f"mx serve --device {device}: {time.perf_counter() - began_s:.2f} s")
        contestants: dict[str, Callable[[], float]] = {}
        for case in CASES:
            if not re.search(only, name_of(case)):
                continue
            try:
                pulled(endpoints, case)
            except MxError as error:
                harness.say(f"{name_of(case)} can't be measured: {error}")
                continue
            contestants[name_of(case)] = partial(pulled, endpoints, case)
        references = {"GPU": GPU, "host": "cpu"}
        for name, device in references.items():
            if loadable(device):
                contestants[f"load_file to {name}"] = partial(loaded, folder, device)
        samples = harness.interleave(contestants, rounds)
    finally:
        cluster.close()
    rows = []
    for name in contestants:
        seconds = harness.median(samples, name)
        detail = f"{seconds:.3f} s for {size / 1e9:.2f} GB"
        way, _, by = name.partition(" by ")
        reference = f"load_file to {way.rpartition(' ')[2]}"
        if by and reference in samples:
            detail += f", {harness.median(samples, reference) / seconds:.2f} x {reference}"
        speed = size / seconds / 1e9
        rows.append(harness.shown(name, speed, "GB/s", detail, {name: samples[name]}))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--gb", type=float, default=4.0, help="of the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where it is kept")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the rows")
    given = parser.parse_args(arguments)
    found = cuda.probe()
    if isinstance(found, Unavailable):
        raise SystemExit(f"no GPU rows: {found.reason}")
    harness.say(found.detail)
    harness.show(
        run(given.folder, int(given.gb * 1e9), given.rounds, given.only), as_json=given.json
    )


if __name__ == "__main__":
    main()
