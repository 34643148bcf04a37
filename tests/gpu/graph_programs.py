"""Programs that capture a graph for another process, or restore one: run by test_graphs.py."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mx.graphs
from mx.cuda import blake3
from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import DeviceAttribute
from mx.cuda.graphs import GraphCalls
from mx.graphs.eager import EagerCall
from mx.graphs.package import GraphPlace

# -- a kernel of mx's own ------------------------------------------------------------------------

CHAINS_BYTES, DIGEST_BYTES = blake3.CHAINS_BYTES, blake3.DIGEST_BYTES
REGION_BYTES = 4 << 20


class Digest:
    """copy = parents' hash of chaining values: a memset, a kernel and a copy."""

    def __init__(self, device: Device, allocate: Callable[[int], int]) -> None:
        self.driver = device.driver
        parts = (
            DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self.driver.device_attribute(device.ordinal, part) for part in parts)
        self.kernel = blake3.compiled(10 * major + minor).hash_parents
        self.module = self.driver.module_load(self.kernel.cubin)
        self.function = self.driver.module_function(self.module, self.kernel.name)
        sizes = {"lengths": 8, "chains": CHAINS_BYTES, "digests": DIGEST_BYTES, "copy": 32}
        self.at = {name: allocate(nbytes) for name, nbytes in sizes.items()}
        self.sizes = sizes

    def run(self, stream: int) -> None:
        at, kernel = self.at, self.kernel
        self.driver.memset(at["digests"], 0, DIGEST_BYTES, stream)
        own = [at["lengths"], at["chains"], at["digests"]]
        given = [*own, *[0] * (kernel.parameters - len(own))]
        grid, threads, shared = (1, 1), kernel.threads, kernel.shared_nbytes
        self.driver.launch(self.function, grid, threads, shared, stream, given)
        self.driver.copy_dtod(at["copy"], at["digests"], DIGEST_BYTES, stream)


def chunks(seed: int, count: int = 5) -> dict[str, bytes]:
    """Return inputs: the length of so many chunks, and chaining values for them."""
    values = bytes((seed + 7 * at) % 251 for at in range(CHAINS_BYTES))
    return {"lengths": (1024 * count).to_bytes(8, "little"), "chains": values}


class Placed:
    """A digest whose memory is a region's; leaving the block unloads its kernel."""

    def __init__(self, digest: Digest, region: mx.graphs.Region) -> None:
        self.digest, self._region = digest, region

    def place(self, name: str) -> GraphPlace:
        nbytes = self.digest.sizes[name]
        offset = self.digest.at[name] - self._region.base
        return GraphPlace(name, 0, offset, nbytes, "U8", (nbytes,))

    def tensors(self, *names: str) -> dict[str, object]:
        return {name: self._region.tensor(self.place(name)) for name in names}

    def write(self, name: str, value: bytes) -> None:
        self._region.write(self.place(name), value)

    def read(self, name: str) -> bytes:
        return self._region.read(self.place(name))

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        GraphCalls().module_unload(self.digest.module)


def capture_digest(out: str, shifted: str) -> None:
    """Capture the digest, and write what was captured."""
    with (
        mx.graphs.region(REGION_BYTES, shifted=shifted == "1") as region,
        region.device.current(),
        Placed(Digest(region.device, region.allocate), region) as placed,
        CudaStream(region.device) as stream,
    ):
        for name, value in chunks(1).items():
            placed.write(name, value)
        calls = GraphCalls()
        calls.capture_begin(stream.handle)
        placed.digest.run(stream.handle)
        graph = calls.capture_end(stream.handle)
        captured = mx.graphs.export(
            graph,
            region,
            inputs=placed.tensors("lengths", "chains"),
            outputs=placed.tensors("copy"),
            images={placed.digest.function: placed.digest.kernel.cubin},
            pin="pin",
        )
        calls.graph_destroy(graph)
    Path(out).write_bytes(captured.to_bytes())


# -- a decode step of torch's --------------------------------------------------------------------

LAYERS, HIDDEN, HEADS, INNER, VOCABULARY, POSITIONS = 4, 512, 8, 1536, 1024, 128


class Llama:
    """A small Llama with random weights in bfloat16, and its cache of keys and values.

    Nothing in it depends on the host: a step reads `token` and `position`, and writes `logits`.
    """

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        draw = torch.Generator("cpu").manual_seed(1)

        def weight(*shape: int) -> Any:
            return (torch.randn(*shape, generator=draw) * 0.02).bfloat16().cuda()

        self.weights: dict[str, Any] = {
            "embed": weight(VOCABULARY, HIDDEN),
            "head": weight(VOCABULARY, HIDDEN),
        }
        for n in range(LAYERS):
            self.weights |= {
                f"{n}.qkv": weight(3 * HIDDEN, HIDDEN),
                f"{n}.out": weight(HIDDEN, HIDDEN),
                f"{n}.up": weight(2 * INNER, HIDDEN),
                f"{n}.down": weight(HIDDEN, INNER),
            }
        kwargs: dict[str, Any] = {"device": "cuda"}
        size = (LAYERS, 2, HEADS, POSITIONS, HIDDEN // HEADS)
        self.cache = torch.zeros(size, dtype=torch.bfloat16, **kwargs)
        self.token = torch.zeros(1, dtype=torch.int64, **kwargs)
        self.position = torch.zeros(1, dtype=torch.int64, **kwargs)
        self.logits = torch.zeros(1, VOCABULARY, dtype=torch.bfloat16, **kwargs)
        self.columns = torch.arange(POSITIONS, **kwargs)
        self.weights["columns"] = self.columns  # a constant, which travels as the weights do

    @property
    def inputs(self) -> dict[str, Any]:
        return {"token": self.token, "position": self.position, "cache": self.cache}

    def step(self) -> None:
        """Compute the next token's logits, and add to the cache."""
        torch, w = self.torch, self.weights
        f = torch.nn.functional
        seen = (self.columns <= self.position)[None, None]
        x = w["embed"].index_select(0, self.token)
        for n in range(LAYERS):
            q, k, v = f.linear(f.rms_norm(x, (HIDDEN,)), w[f"{n}.qkv"]).chunk(3, -1)
            q, k, v = (each.view(HEADS, 1, -1) for each in (q, k, v))
            self.cache[n, 0].index_copy_(1, self.position, k)
            self.cache[n, 1].index_copy_(1, self.position, v)
            scores = (q.float() @ self.cache[n, 0].float().transpose(1, 2)) * q.shape[-1] ** -0.5
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            mixed = (shares @ self.cache[n, 1].float()).bfloat16().reshape(1, HIDDEN)
            x = x + f.linear(mixed, w[f"{n}.out"])
            gate, up = f.linear(f.rms_norm(x, (HIDDEN,)), w[f"{n}.up"]).chunk(2, -1)
            x = x + f.linear(f.silu(gate) * up, w[f"{n}.down"])
        self.logits.copy_(f.linear(f.rms_norm(x, (HIDDEN,)), w["head"]))

    def calls(self) -> list[EagerCall]:
        """Return what loads the step's kernels: the step itself, and its products."""
        torch = self.torch

        def on(work: Callable[[], object]) -> Callable[[int], None]:
            def run(stream: int) -> None:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)), torch.no_grad():
                    work()

            return run

        loaded = Path("/proc/self/maps").read_text().split()
        found = {
            name: Path(next(each for each in loaded if name in each))
            for name in ("libtorch_cuda.so", "libcublasLt.so")
        }
        x, wide = (torch.zeros(1, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, INNER))

        def products() -> None:
            for name, weight in self.weights.items():
                if weight.dim() == 2 and name != "embed":
                    torch.nn.functional.linear(x if weight.shape[1] == HIDDEN else wide, weight)

        return [
            EagerCall("step", found["libtorch_cuda.so"], on(self.step)),
            EagerCall("products", found["libcublasLt.so"], on(products)),
        ]


def _bytes(tensor: Any) -> bytes:
    """Return a bfloat16 tensor's bytes: numpy has no such numbers."""
    found: bytes = tensor.detach().cpu().contiguous().view(_torch().int16).numpy().tobytes()
    return found


def _torch() -> Any:
    """Return torch, much of which has no types."""
    return importlib.import_module("torch")


@contextlib.contextmanager
def _deterministic(torch: Any) -> Iterator[None]:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with torch.no_grad():
        yield


def capture_llama(out: str, shifted: str) -> None:
    """Capture a decode step, and write what was captured, the weights and the time it took."""
    torch = _torch()
    torch.cuda.init()
    with (
        mx.graphs.region(1 << 30, shifted=shifted == "1") as region,
        _deterministic(torch),
    ):
        pool, stream = region.pool(), torch.cuda.Stream()
        with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
            model = Llama(torch)
            for _ in range(3):
                model.step()
            model.token.fill_(17)
            model.position.fill_(3)
            stream.synchronize()
        began_s = time.perf_counter()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=pool.id, stream=stream):
            model.step()
        captured_s = time.perf_counter() - began_s
        captured = mx.graphs.export(
            graph.raw_cuda_graph(),
            region,
            weights=model.weights,
            inputs=model.inputs,
            outputs={"logits": model.logits},
            calls=model.calls(),
            pin="pin",
        )
        Path(out).write_bytes(captured.to_bytes())
        if shifted == "0":
            torch.save({n: w.cpu() for n, w in model.weights.items()}, f"{out}.weights")
        print(json.dumps({"nodes": len(captured.graph.nodes), "captured_s": captured_s}))


def restore_llama(folder: str) -> None:
    """Restore the step, prove it, and compare a few tokens bit for bit with eager ones."""
    torch = _torch()
    torch.cuda.init()
    with _deterministic(torch):
        eager = Llama(torch)
        eager.step()  # libraries load, as a warm engine has them
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        with mx.graphs.restore(
            Path(folder, "graph").read_bytes(),
            lambda digest: Path(folder, digest).read_bytes(),
            pin="pin",
            calls=eager.calls(),
        ) as graph:
            restored_s = time.perf_counter() - began_s
            weights = torch.load(Path(folder, "weights"))
            for name, tensor in graph.tensors().items():
                torch.from_dlpack(tensor).copy_(weights[name])
            torch.cuda.synchronize()

            def run(token: int, position: int, *, fresh: bool) -> bytes:
                if fresh:
                    eager.cache.zero_()
                eager.token.fill_(token)
                eager.position.fill_(position)
                eager.step()
                torch.cuda.synchronize()
                return _bytes(eager.logits)

            expected = {"logits": run(29, 0, fresh=True)}
            given = {"token": 29, "position": 0}
            unseen = {name: value.to_bytes(8, "little") for name, value in given.items()}
            unseen["cache"] = bytes(eager.cache.nbytes)
            proved = graph.prove(unseen, expected)
            same = []
            if proved:
                views = {n: torch.from_dlpack(each) for n, each in graph.inputs().items()}
                logits = torch.from_dlpack(graph.outputs()["logits"])
                for position, token in enumerate((5, 9, 700)):
                    views["token"].fill_(token)
                    views["position"].fill_(position)
                    assert graph.launch(torch.cuda.current_stream().cuda_stream)
                    torch.cuda.synchronize()
                    same.append(_bytes(logits) == run(token, position, fresh=position == 0))
            print(
                json.dumps(
                    {
                        "state": graph.state.value,
                        "reason": str(graph.reason or ""),
                        "same": same,
                        "restored_s": restored_s,
                    }
                )
            )
