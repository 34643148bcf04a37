"""Measures whole pulls into and out of a GPU beside the bare copy of as many bytes, and beside
safetensors' own load of the same checkpoint.

    PYTHONPATH=.:transports python -m benchmarks.gpu_pull [--rounds 3] [--gb 8] [--folder .bench]

Two sources of the checkpoint, `mx serve` on the host and on the GPU, are processes of their own. A
pull is timed from the call until each layer is verified, in a process that has pulled before. From
disk it reads a copy with digests beside the weights, by O_DIRECT into pinned slots, and by cuFile
where that can be used. The bare copy is the driver's alone, from and to pinned memory where one end
is in the host: a pull by pcie_p2p or cuda_ipc of 8 GB and more has to reach half of it. The parts
of a pull are timed by themselves: a context, pinning, and digests; its bytes are the bare copy.
`load_file` reads the files from the page cache to the same device, and verifies nothing; it needs
torch. One GPU is enough.
"""

from __future__ import annotations

import contextlib
import mmap
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mx
from mx.buffers import address_of
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory, PinnedMemory, PinnedRegion
from mx.cuda.digest import BlockDigester
from mx.errors import LocalError, MxError
from mx.transport import Unavailable
from mx.units import GIB, MIB
from mx_transports.toolkit.cuda.copier import DIRECT_STEP_BYTES
from mx_transports.toolkit.cuda.hosts import STEP_BYTES
from mx_transports.toolkit.cuda.windows import WINDOW_BYTES

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .gpu import Copy, bare
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


def written(folder: Path) -> tuple[Path, str]:
    """Return a copy of a checkpoint that has digests beside the weights, and its pin."""
    copy = folder.with_name(f"{folder.name}-digests")
    with mx.pull(MODEL, path=folder, out=None if copy.exists() else copy) as pull:
        return copy, pull.wait().pin


def from_disk(folder: Path, pin: str, way: str) -> float:
    """Pull once from disk into the GPU, and return the seconds until all is verified.

    Args:
        folder: The checkpoint, with digests beside the weights.
        pin: Its pin.
        way: "slots" or "cufile", in compatibility mode, too.

    Raises:
        LocalError: It went another way.
    """
    settings = mx.config.load({"gpudirect": "off" if way == "slots" else "always"})
    began_s = time.perf_counter()
    with mx.pull(f"{MODEL}@{pin}", path=folder, device=GPU, settings=settings) as pull:
        (path,) = pull.wait(300).paths
        seconds = time.perf_counter() - began_s
    if way not in path.detail.partition(":")[0]:
        raise LocalError(f"it was read {path.detail}")
    return seconds


def copied(device: Device, way: str, nbytes: int) -> float:
    """Copy as many bytes by the driver alone, and return the seconds.

    Args:
        device: The GPU.
        way: "GPU to GPU", "host to GPU" or "GPU to host".
        nbytes: The bytes, copied in steps over memory of a GiB at most.
    """
    driver, room = device.driver, min(nbytes, GIB)
    with DeviceMemory(device, room) as one, contextlib.ExitStack() as stack:
        copy: Copy
        if way == "GPU to GPU":
            other = stack.enter_context(DeviceMemory(device, room)).address
            copy, ends, step = driver.copy_dtod, (one.address, other), DIRECT_STEP_BYTES
        else:
            host = stack.enter_context(PinnedMemory(device, room)).address
            into = way == "host to GPU"
            copy, step = (driver.copy_htod if into else driver.copy_dtoh), STEP_BYTES
            ends = (one.address, host) if into else (host, one.address)
        sizes = [min(room, nbytes - at) for at in range(0, nbytes, room)]
        return sum(bare(device, copy, *ends, size, step) for size in sizes)


def parts(device: Device, nbytes: int) -> dict[str, Callable[[], float]]:
    """Return what times the parts of a pull of so many bytes, each by itself, by name."""

    def context() -> float:
        code = "from mx.cuda import driver, device; device.Device(driver.load(), 0)"
        timed = f"import time; began = time.perf_counter(); {code}; "
        timed = "import mx.cuda.bindings; " + timed + "print(time.perf_counter() - began)"
        return float(subprocess.check_output([sys.executable, "-c", timed]))

    def pinning() -> float:
        with mmap.mmap(-1, nbytes) as memory:
            view = memoryview(memory)
            address = address_of(view)
            for at in range(0, nbytes, 4096):  # pages that are there
                view[at] = 1
            view.release()
            began_s = time.perf_counter()
            with contextlib.ExitStack() as stack:
                for at in range(0, nbytes, WINDOW_BYTES):
                    window = min(WINDOW_BYTES, nbytes - at)
                    stack.enter_context(PinnedRegion(device, address + at, window))
                seconds = time.perf_counter() - began_s
        return seconds

    def digests() -> float:
        room = min(nbytes, GIB) // MIB * MIB
        with DeviceMemory(device, room) as memory:
            digester = BlockDigester(device)
            try:
                blocks = [(memory.address + at, MIB) for at in range(0, room, MIB)]
                began_s = time.perf_counter()
                digester.digests(blocks)
                return (time.perf_counter() - began_s) * nbytes / room
            finally:
                digester.close()

    return {"a context": context, "pinning, one thread": pinning, "digests": digests}


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


def run(gpu: Device, folder: Path, nbytes: int, rounds: int, only: str = "") -> list[harness.Row]:
    """Measure and return all rows.

    Args:
        gpu: The GPU.
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
        for way in ("slots", "cufile"):
            name = f"disk to GPU by {way}"
            if re.search(only, name):
                try:
                    described = written(folder)
                    from_disk(*described, way)
                except MxError as error:
                    harness.say(f"{name} can't be measured: {error}")
                    continue
                contestants[name] = partial(from_disk, *described, way)
        references = {"GPU": GPU, "host": "cpu"}
        for name, target in references.items():
            if loadable(target):
                contestants[f"load_file to {name}"] = partial(loaded, folder, target)
        for way in dict.fromkeys(
            name.partition(" by ")[0]
            for name in contestants
            if re.search("^(host|GPU).* by ", name)
        ):
            contestants[f"bare, {way}"] = partial(copied, gpu, way, size)
        contestants |= parts(gpu, size)
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
        if by in ("cuda_ipc", "pcie_p2p"):
            both = {"mx": samples[name], "bare": samples[f"bare, {way}"]}
            bar = 0.5 if size >= 8e9 else 0.0
            rows.append(harness.ratio(f"{name}, beside the bare copy", both, "bare", bar, size))
        speed = size / seconds / 1e9
        rows.append(harness.shown(name, speed, "GB/s", detail, {name: samples[name]}))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--gb", type=float, default=8.0, help="of the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where it is kept")
    parser.add_argument("--only", default="", metavar="REGEX", help="of the rows")
    given = parser.parse_args(arguments)
    found = cuda.probe()
    if isinstance(found, Unavailable):
        raise SystemExit(f"no GPU rows: {found.reason}")
    harness.say(found.detail)
    with Device(cuda.load(), 0) as gpu:
        rows = run(gpu, given.folder, int(given.gb * 1e9), given.rounds, given.only)
    harness.show(rows, as_json=given.json)


if __name__ == "__main__":
    main()
