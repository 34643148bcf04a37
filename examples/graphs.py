"""A CUDA graph that was captured in two processes is launched by another, with a peer's weights.

    python examples/graphs.py                  # on a GPU
    python examples/graphs.py --stand-in 13    # in a clone without one: over the stand-in driver

A publisher captures a small layer in two processes, joins what both saw, and signs it.
A replica finds the graph by its weights, restores it while they arrive from a peer, proves it with
an input that the captures did not see, and launches it. Coordinator, keys and trust file are made
in a temporary folder. Needs cuda-bindings and Triton, and no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import children
import numpy as np
import triton
import triton.language as tl
from safetensors.numpy import save_file

NAME = "example-layer"
#: Numbers in a row; threads of a block.
N, THREADS = 96, 128
REGION_BYTES = 8 << 20
SHAPES = {"gate.weight": (N, N), "up.weight": (N, N)}


@triton.jit
def matvec(x, weights, out, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = weights @ x"""
    row = tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for k in range(n):
        total += tl.load(x + k) * tl.load(weights + row * n + k, mask=row < n, other=0.0)
    tl.store(out + row, total, mask=row < n)


@triton.jit
def add(x, y, out, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = x + y"""
    at = tl.arange(0, block)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


#: The kernels, and the names of their pointers.
KERNELS = {"matvec": (matvec, ("x", "weights", "out")), "add": (add, ("x", "y", "out"))}


def compiled(name: str, capability: int) -> Any:
    """Return a kernel that is compiled for a compute capability, times ten."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, pointers = KERNELS[name]
    signature = {**dict.fromkeys(pointers, "*fp32"), "n": "i32", "block": "constexpr"}
    source = ASTSource(fn=function, signature=signature, constexprs={"block": THREADS})
    options = {"num_warps": THREADS // 32, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class Layer:
    """out = x + gate @ x + up @ x: kernels, and places of tensors.

    Args:
        device: The GPU, whose context is current.
        allocate: Returns the address of so many bytes.
        weights: The addresses of the weights; by default they are allocated too.
    """

    def __init__(
        self, device: Any, allocate: Callable[[int], int], weights: dict[str, int] | None = None
    ) -> None:
        from mx.cuda.driver import DeviceAttribute

        self.driver, ordinal = device.driver, device.ordinal
        parts = (
            DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self.driver.device_attribute(ordinal, part) for part in parts)
        #: CUfunctions by name, and the images that they come from.
        self.functions: dict[str, int] = {}
        self.images: dict[int, bytes] = {}
        for name in KERNELS:
            image = compiled(name, 10 * major + minor).asm["cubin"]
            function = self.driver.module_function(self.driver.module_load(image), name)
            self.functions[name], self.images[function] = function, image
        if weights is None:
            weights = {name: allocate(4 * N * N) for name in SHAPES}
        vectors = ("x", "gate", "up", "sum", "out")
        self.at = weights | {name: allocate(4 * N) for name in vectors}

    def run(self, stream: int) -> None:
        """Queue the layer."""

        def launch(kernel: str, *names: str) -> None:
            # n, and two pointers to scratch memory that Triton adds.
            given = [*(self.at[name] for name in names), N, 0, 0]
            self.driver.launch(self.functions[kernel], (1, 1), THREADS, 0, stream, given)

        launch("matvec", "x", "gate.weight", "gate")
        launch("matvec", "x", "up.weight", "up")
        launch("add", "gate", "up", "sum")
        launch("add", "x", "sum", "out")


def vector(seed: int) -> bytes:
    """Return an input."""
    return np.random.default_rng(seed).standard_normal(N, np.float32).tobytes()


def capture(address: str, decoys: bool, out: Path) -> None:
    """Capture the layer with weights that a peer has, and write what was captured."""
    import mx
    import mx.graphs
    from mx.cuda.device import CudaStream
    from mx.graphs.calls import GraphCalls
    from mx.graphs.package import GraphPlace

    with mx.graphs.region(REGION_BYTES, decoys=decoys) as region, region.device.current():
        layer = Layer(region.device, region.allocate)

        def tensor(name: str, shape: tuple[int, ...]) -> Any:
            nbytes = 4 * int(np.prod(shape))
            return region.tensor(
                GraphPlace(name, 0, layer.at[name] - region.base, nbytes, "F32", shape)
            )

        weights = {name: tensor(name, shape) for name, shape in SHAPES.items()}
        pin = mx.plan(NAME, coordinator=address).ref.identity.hex()
        with mx.pull(f"{NAME}@{pin}", into=weights, coordinator=address) as pull:
            pull.wait()
        x, result = tensor("x", (N,)), tensor("out", (N,))
        with CudaStream(region.device) as stream:
            calls = GraphCalls()
            calls.capture_begin(stream.handle)
            layer.run(stream.handle)
            graph = calls.capture_end(stream.handle)
        captured = mx.graphs.export(
            graph,
            region,
            weights=weights,
            inputs={"x": x},
            outputs={"out": result},
            images=layer.images,
            pin=pin,
        )
        out.write_bytes(captured.to_bytes())


def publisher(address: str) -> None:
    """Capture in two processes, join the captures, and keep the graph to be published."""
    import mx.graphs

    with tempfile.TemporaryDirectory() as folder:
        captures = []
        for decoys in ("0", "1"):
            out = Path(folder, decoys)
            step("capture", address, decoys, out)
            captures.append(mx.graphs.Capture.from_bytes(out.read_bytes()))
    package = mx.graphs.combine(*captures)
    mx.graphs.record(package, "layer")
    print(
        f"publisher: a graph of {len(package.graph)} bytes and {len(package.images)} images "
        f"for {package.environment}",
        file=sys.stderr,
    )


def replica(address: str, trust: str) -> None:
    """Find the graph, restore it, pull the weights, prove it, and launch it."""
    import mx
    import mx.graphs
    from mx.cuda.device import CudaStream, Device, DeviceMemory
    from mx.cuda.driver import load

    pin = mx.plan(NAME, coordinator=address).ref.identity.hex()
    found = mx.graphs.find(NAME, pin=pin, trust=trust, coordinator=address)
    if not found.graphs:
        print(f"replica: captures as always: {'; '.join(found.reasons)}")
        return
    published = found.graphs["layer"]
    began_s = time.monotonic()
    with mx.graphs.restore(published.message, published.image, pin=pin) as graph:
        restored_s = time.monotonic() - began_s
        if graph.reason:
            print(f"replica: captures as always, since {graph.reason}")
            return
        with mx.pull(f"{NAME}@{pin}", into=graph.tensors(), coordinator=address) as pull:
            report = pull.wait()
        with contextlib.ExitStack() as ends:
            device = ends.enter_context(Device(load(), 0))
            ends.enter_context(device.current())
            stream = ends.enter_context(CudaStream(device))

            # The engine's own memory and kernels, over the same weights.
            def allocate(nbytes: int) -> int:
                return ends.enter_context(DeviceMemory(device, nbytes)).address

            weights = {name: tensor.address for name, tensor in graph.tensors().items()}
            eager = Layer(device, allocate, weights)

            def computed(x: bytes) -> bytes:
                upload(device, eager.at["x"], x)
                eager.run(stream.handle)
                return fetch(device, eager.at["out"], stream)

            proved = graph.prove({"x": vector(1)}, {"out": computed(vector(1))})
            print(
                f"replica: a graph by {found.signer!r}, found in {found.seconds:.2f} s,\n"
                f"  restored in {1e3 * restored_s:.0f} ms; {report.bytes / 1e3:.0f} kB of weights "
                f"by {report.paths[0].transport};\n  proved: {graph.reason or proved}"
            )
            for seed in range(2, 5):
                upload(device, graph.inputs()["x"].address, vector(seed))
                assert graph.launch(stream.handle), graph.reason
                found = fetch(device, graph.outputs()["out"].address, stream)
                print(
                    f"replica: input {seed}: as without a graph: {found == computed(vector(seed))}"
                )


def upload(device: Any, address: int, data: bytes) -> None:
    """Copy bytes to the GPU, and wait."""
    from mx.cuda.ring import PinnedRing

    with contextlib.closing(PinnedRing(device)) as ring:
        ring.upload(address, memoryview(data))


def fetch(device: Any, address: int, stream: Any) -> bytes:
    """Return a vector, after the stream's work."""
    from mx.cuda.ring import PinnedRing

    stream.synchronize()
    found = bytearray(4 * N)
    with contextlib.closing(PinnedRing(device)) as ring:
        ring.download(address, memoryview(found))
    return bytes(found)


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[dict[str, str]]:
    """Run a daemon of mx, and yield the object that it prints when it is ready."""
    program = Path(sys.executable).with_name(str(command[0]))
    quiet = ("--json", "--log-format", "text", "--log-level", "error")
    line = children.command(program, *command[1:], *quiet)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def stand_in(major: int) -> dict[str, str]:
    """Return the environment of processes over the stand-in driver, which runs these kernels."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.driver import build, kernels

    own = tuple(kernels.Image.of(compiled(name, 90)) for name in KERNELS)
    return build.environment(major, {"KERNELS": build.kernels_library(90, own)})


def step(*arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    """Run a part of this example in a process of its own."""
    command = children.command(sys.executable, __file__, *arguments)
    subprocess.run(command, check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stand-in", type=int, metavar="MAJOR", help="the driver's major version")
    major = parser.parse_args().stand_in
    children.end_on_signals()
    environment: dict[str, str] = {}
    if major is None:
        from mx.cuda.driver import load
        from mx.errors import MxError

        try:
            load()
        except MxError as error:
            parser.exit(2, f"{error}; without a GPU: --stand-in 13, in a clone of mx\n")

    def mx_command(*arguments: str | Path) -> str:
        command = children.command(Path(sys.executable).with_name("mx"), *arguments)
        return subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        ).stdout

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as daemons:
        scratch = Path(folder)
        # Kernels of older lines of this file have other bytes.
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/cache"}
        environment.update(os.environ if major is None else stand_in(major))
        draw = np.random.default_rng(0).standard_normal
        tensors = {name: draw(shape, np.float32) for name, shape in SHAPES.items()}
        save_file(tensors, scratch / "layer.safetensors")
        coordinator = daemons.enter_context(running("mx-coordinator", "--listen", "127.0.0.1:0"))
        address = coordinator["listen"]
        at = ("--coordinator", address)
        weights = scratch / "layer.safetensors"
        daemons.enter_context(running("mx", "serve", weights, "--model", NAME, *at))

        key, recorded, package = (scratch / each for each in ("key", "out", "graphs.safetensors"))
        public = json.loads(mx_command("artifacts", "keygen", key, "--json"))["key"]
        trust = scratch / "trust.toml"
        trust.write_text(f'[[signer]]\nname = "me"\nkey = "{public}"\nmodels = ["example-*"]\n')
        trust.chmod(0o600)
        worker = [sys.executable, __file__, "publisher", address]
        mx_command("artifacts", "record", recorded, "--", *worker)
        signed = ("--model", NAME, "--key", key, "--out", package)
        mx_command("artifacts", "publish", recorded, "--graphs", *signed)
        daemons.enter_context(running("mx", "serve", "--artifacts", package, *at))
        step("replica", address, trust, environment=environment)


if __name__ == "__main__":
    if sys.argv[1:2] == ["capture"]:
        capture(sys.argv[2], sys.argv[3] == "1", Path(sys.argv[4]))
    elif sys.argv[1:2] == ["publisher"]:
        publisher(sys.argv[2])
    elif sys.argv[1:2] == ["replica"]:
        replica(*sys.argv[2:])
    else:
        main()
