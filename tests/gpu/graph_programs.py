"""Programs that capture a graph for another process, or restore one: run by test_graphs.py."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mx.graphs
from mx.cuda.device import CudaStream, Device
from mx.cuda.driver import DeviceAttribute
from mx.graphs.calls import GraphCalls
from mx.graphs.eager import EagerCall
from mx.graphs.functions import mapped_libraries
from mx.graphs.message import Capture
from mx.graphs.package import GraphPlace
from mx.graphs.trial import Trial
from tests.support.driver import kernels

# -- a kernel of pointers alone --------------------------------------------------------------------

CHAINS_BYTES, DIGEST_BYTES = 2 * 1024 * 32, 32
#: Graphs of one package: the bytes that each copies, and where its kernel writes.
SIZES = {"whole": (DIGEST_BYTES, "digests"), "half": (DIGEST_BYTES // 2, "more")}
REGION_BYTES = 4 << 20
#: Where an engine has a region of its own, beside that of a graph.
OWN_BASE = 0x6B00_0000_0000


class Digest:
    """copy = parents' hash of chaining values: a memset, a kernel and a copy."""

    def __init__(self, device: Device, allocate: Callable[[int], int]) -> None:
        self.driver = device.driver
        parts = (
            DeviceAttribute.COMPUTE_CAPABILITY_MAJOR,
            DeviceAttribute.COMPUTE_CAPABILITY_MINOR,
        )
        major, minor = (self.driver.device_attribute(device.ordinal, part) for part in parts)
        # As the stand-in's library has it: what Triton makes depends on what it has made before.
        self.kernel = kernels.digests(10 * major + minor)[-1]
        self.module = self.driver.module_load(self.kernel.cubin)
        self.function = self.driver.module_function(self.module, self.kernel.name)
        sizes = {"lengths": 8, "chains": CHAINS_BYTES, "copy": DIGEST_BYTES}
        sizes |= dict.fromkeys(("digests", "more"), DIGEST_BYTES)
        self.at = {name: allocate(nbytes) for name, nbytes in sizes.items()}
        self.sizes = sizes

    def run(self, stream: int, size: str = "whole") -> None:
        at, kernel, (nbytes, to) = self.at, self.kernel, SIZES[size]
        self.driver.memset(at[to], 0, nbytes, stream)
        own = [at["lengths"], at["chains"], at[to]]
        given = [*own, *[0] * (len(kernel.parameters) - len(own))]
        self.driver.launch(self.function, (1, 1), kernel.threads, 0, stream, given)
        self.driver.copy_dtod(at["copy"], at[to], nbytes, stream)


def chunks(seed: int, count: int = 5) -> dict[str, bytes]:
    """Return inputs: the length of so many chunks, and chaining values for them."""
    values = bytes((seed + 7 * at) % 251 for at in range(CHAINS_BYTES))
    return {"lengths": (1024 * count).to_bytes(8, "little"), "chains": values}


class Placed:
    """A digest whose memory is a region's; leaving the block unloads its kernel."""

    def __init__(self, digest: Digest, region: mx.graphs.Region) -> None:
        self.digest, self._region = digest, region

    def place(self, name: str, size: str = "whole") -> GraphPlace:
        nbytes = SIZES[size][0] if name == "copy" else self.digest.sizes[name]
        offset = self.digest.at[name] - self._region.base
        return GraphPlace(name, 0, offset, nbytes, "U8", (nbytes,))

    def tensors(self, *names: str, size: str = "whole") -> dict[str, object]:
        return {name: self._region.tensor(self.place(name, size)) for name in names}

    def write(self, name: str, value: bytes) -> None:
        self._region.write(self.place(name), value)

    def read(self, name: str, size: str = "whole") -> bytes:
        return self._region.read(self.place(name, size))

    def __enter__(self) -> Placed:
        return self

    def __exit__(self, *_: object) -> None:
        GraphCalls().module_unload(self.digest.module)


def capture_digest(out: str, decoys: str) -> None:
    """Capture the digest in each size, and write what was captured."""
    with (
        mx.graphs.region(REGION_BYTES, decoys=decoys == "1") as region,
        region.device.current(),
        Placed(Digest(region.device, region.allocate), region) as placed,
        CudaStream(region.device) as stream,
    ):
        calls = GraphCalls()
        for size in SIZES:
            for name, value in chunks(1).items():
                placed.write(name, value)
            calls.capture_begin(stream.handle)
            placed.digest.run(stream.handle, size)
            graph = calls.capture_end(stream.handle)
            captured = mx.graphs.export(
                graph,
                region,
                inputs=placed.tensors("lengths", "chains"),
                outputs=placed.tensors("copy", size=size),
                images={placed.digest.function: placed.digest.kernel.cubin},
                pin="pin",
                name=size,
            )
            calls.graph_destroy(graph)
            Path(f"{out}.{size}").write_bytes(captured.to_bytes())


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
        """Return what loads the step's kernels that are in no fatbin: its products."""
        torch = self.torch

        def on(work: Callable[[], object]) -> Callable[[int], None]:
            def run(stream: int) -> None:
                with torch.cuda.stream(torch.cuda.ExternalStream(stream)), torch.no_grad():
                    work()

            return run

        x, wide = (torch.zeros(1, n, dtype=torch.bfloat16, device="cuda") for n in (HIDDEN, INNER))

        def products() -> None:
            for name, weight in self.weights.items():
                if weight.dim() == 2 and name != "embed":
                    torch.nn.functional.linear(x if weight.shape[1] == HIDDEN else wide, weight)

        return [EagerCall("products", _libraries()[-1], on(products))]


def _libraries() -> list[Path]:
    """Return the libraries whose kernels a step launches."""
    mapped = mapped_libraries()
    names = ("libtorch_cuda.so", "libcublas.so", "libcublasLt.so")
    return [next(path for path in mapped if path.name.startswith(name)) for name in names]


def llama_calls() -> list[EagerCall]:
    """Return the calls of a step, for the child of a trial."""
    torch = _torch()
    torch.cuda.init()
    model = Llama(torch)
    model.step()
    return model.calls()


def llama_trial(folder: Path) -> Trial:
    """Return a trial with the weights of `capture_llama`, of early and late positions."""
    torch = _torch()
    weights = torch.load(folder / "capture-0.weights")
    model = Llama(torch)
    model.step()  # libraries load
    drawn = torch.randn(model.cache.shape, generator=torch.Generator("cpu").manual_seed(2))
    inputs = []
    for token, position, cache in ((1, 0, 0 * drawn), (VOCABULARY - 1, POSITIONS - 1, drawn)):
        numbers = {"token": token, "position": position}
        given = {name: number.to_bytes(8, "little") for name, number in numbers.items()}
        inputs.append({**given, "cache": _bytes(cache.bfloat16())})
    return Trial(
        {name: w.contiguous().view(torch.uint8).numpy().tobytes() for name, w in weights.items()},
        inputs,
        libraries=_libraries(),
        calls="tests.gpu.graph_programs:llama_calls",
    )


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


def capture_llama(out: str, decoys: str) -> None:
    """Capture a decode step, and write what was captured, the weights and the time it took."""
    torch = _torch()
    torch.cuda.init()
    with (
        mx.graphs.region(1 << 30, decoys=decoys == "1") as region,
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
            libraries=_libraries(),
            calls=model.calls(),
            pin="pin",
        )
        Path(f"{out}.step").write_bytes(captured.to_bytes())
        if decoys == "0":
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


# -- a decode step of a model of transformers -----------------------------------------------------

DECODE_POSITIONS, DECODER = 64, "decoder"
#: Names the folder with the checkpoint and what was captured.
FOLDER = "MX_TEST_DECODER"


def _at(name: str) -> Path:
    return Path(os.environ[FOLDER], name)


def _engine() -> Any:
    """Return the module of the engine's graphs, which imports torch and transformers."""
    return importlib.import_module("mx.engines.transformers.graphs")


def save_decoder() -> None:
    """Write a checkpoint of a small Llama of transformers."""
    torch, transformers = _torch(), importlib.import_module("transformers")
    torch.manual_seed(4)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(_at(DECODER))


def _decoder(attention: str) -> Any:
    transformers = importlib.import_module("transformers")
    given = {"dtype": _torch().bfloat16, "attn_implementation": attention}
    return transformers.LlamaForCausalLM.from_pretrained(_at(DECODER), **given).eval()


def capture_decoder(decoys: str, coordinator: str, attention: str) -> None:
    """Capture a decode step, and write what was captured."""
    engine = _engine()
    made = engine.capture(
        DECODER,
        engine.Decode(1, DECODE_POSITIONS),
        decoys=decoys == "1",
        coordinator=coordinator,
        attn_implementation=attention,
    )
    _at(f"capture-{decoys}").write_bytes(made.to_bytes())


def decoder_calls() -> list[EagerCall]:
    """Return the calls of the step, for the child of a trial."""
    model = _decoder("eager").cuda()
    found: list[EagerCall] = _engine().products(model, 1)
    return found


def record_decoder(attention: str) -> None:
    """Join both captures, vouch for bytes by a trial of early and late tokens, and record it."""
    torch, engine = _torch(), _engine()
    captures = [Capture.from_bytes(_at(f"capture-{n}").read_bytes()) for n in (0, 1)]
    model, decode = _decoder(attention), engine.Decode(1, DECODE_POSITIONS)

    def content(tensor: Any) -> bytes:
        found: bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found

    tensors = dict(model.named_parameters()) | {
        f"buffer:{name}": tensor for name, tensor in model.named_buffers()
    }
    inputs = []
    with torch.no_grad():
        step = engine.DecodeStep(model, decode)
        step.run(step.example(0, 0))
        for token, length in ((1, 0), (VOCABULARY - 1, DECODE_POSITIONS - 1)):
            given = step.example(token, length) | step.state(results=False)
            inputs.append({name: content(each) for name, each in given.items()})
    trial = Trial(
        {each.name: content(tensors[each.name]) for each in captures[0].graph.weights},
        inputs,
        libraries=_libraries(),
        calls="tests.gpu.graph_programs:decoder_calls",
    )
    mx.graphs.record(mx.graphs.combine(*captures, trial=trial), decode.name)


def use_decoder(coordinator: str, trust: str, attention: str) -> None:
    """Generate by the graph and without it, and compare tokens and logits."""
    torch, engine = _torch(), _engine()
    loader = importlib.import_module("mx.engines.transformers")
    cache_of = importlib.import_module("transformers").StaticCache
    given = {"coordinator": coordinator, "device": "cuda:0", "attn_implementation": attention}
    decode = engine.Decode(1, DECODE_POSITIONS)
    model = loader.load(DECODER, graphs=decode, trust=trust, **given)
    eager = loader.load(DECODER, **given)
    began_s = time.perf_counter()
    how = loader.decoding(model)
    how.cache()
    proved_s = time.perf_counter() - began_s

    def generated(one: Any, cache: Any, prompt: list[int]) -> tuple[Any, Any]:
        options = {"do_sample": False, "disable_compile": True, "max_new_tokens": 24}
        found = one.generate(
            torch.tensor([prompt], device="cuda:0"),
            past_key_values=cache,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
        return found.sequences, torch.stack(found.logits)

    same = []
    for prompt in ([5, 9, 700], [1], list(range(30))):
        other = cache_of(config=eager.config, max_cache_len=DECODE_POSITIONS)
        one = generated(model, how.cache(), prompt)
        same += [
            torch.equal(*pair) for pair in zip(one, generated(eager, other, prompt), strict=True)
        ]
    said = {"reason": how.reason, "same": same, "proved_s": proved_s, "counts": mx.graphs.counts()}
    print(json.dumps(said))
