"""A model of transformers whose decode step is kernels of the stand-in, and `torch.cuda` for it.

torch is built for CPUs here. What of `torch.cuda` a capture uses (streams, pools, graphs) is stood
in for by its contract, over the real driver's calls; the model's forward launches kernels of a
library called libtorch_cuda.so on the current stream, as torch's own does. The numbers that it
computes with are small and whole, so that there is one right result.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from mx.graphs.calls import GraphCalls
from tests.support.driver.torch_gpu import DEVICE, Gpu, Owner

WIDTH, VOCABULARY, BLOCK = 32, 64, 128
_FIELDS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "head_dim": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip


def weights(seed: int = 3) -> dict[str, torch.Tensor]:
    """Return weights of the model."""
    draw = torch.Generator().manual_seed(seed)
    shape = (VOCABULARY, WIDTH)
    return {
        f"{name}.weight": torch.randint(-3, 4, shape, generator=draw).float()
        for name in ("embed", "head")
    }


def save(folder: Path, seed: int = 3) -> None:
    """Write a checkpoint of the model."""
    folder.mkdir()
    LlamaConfig(**_FIELDS, architectures=["StepModel"]).save_pretrained(folder)
    save_file(weights(seed), folder / "model.safetensors")


def greedy(prompt: Sequence[int], count: int, seed: int = 3) -> list[int]:
    """Return the tokens that the model generates behind a prompt, as computed here."""
    found, named, mixed = list(prompt), weights(seed), torch.zeros(WIDTH)
    for at in range(len(prompt) + count - 1):
        x = named["embed.weight"][found[at]] * (1 + torch.arange(WIDTH) % 2) + at
        mixed = mixed + 2 * x
        if at + 1 >= len(prompt):
            found.append(int((named["head.weight"] @ (mixed + x)).argmax()))
    return found


class StepModel(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """A language model of one layer, whose kernels `StandInCuda` has."""

    config_class = LlamaConfig
    cuda: Any = None
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", self._scale(), persistent=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def _scale(self) -> torch.Tensor:
        return (1 + torch.arange(WIDTH) % 2).float()

    def _init_weights(self, module: Any) -> None:
        if module is self:
            transformers.initialization.copy_(self.scale, self._scale())

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        return_dict: bool = True,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        (name,) = more
        cache = more[name]
        (layer,) = cache.layers
        if not layer.is_initialized:
            layer.lazy_initialization(*[torch.zeros(1, 1, 0, WIDTH)] * 2)
            for field in ("keys", "values", "cumulative_length"):
                setattr(layer, field, self.cuda.gpu.moved(getattr(layer, field)))
        count, positions = layer.cumulative_length, position_ids
        ids, mask = input_ids, attention_mask
        for at in range(input_ids.shape[1]):
            if not self.cuda.capturing:
                begin = int(count)
                mask = torch.where(torch.arange(layer.max_cache_len) <= begin, 0.0, -1.0)
                ids, positions = input_ids[:, at : at + 1], torch.tensor([[begin]])
                mask, positions, ids = map(self.cuda.there, (mask, positions, ids))
            hidden, logits = (self.cuda.empty(1, 1, n) for n in (WIDTH, VOCABULARY))
            launch = self.cuda.launch
            embed, head = self.embed.weight, self.head.weight
            given = (ids, positions, mask, count, embed, self.scale, layer.keys, layer.values)
            launch("attend", *given, hidden, layer.max_cache_len, WIDTH)
            launch("advance", count)
            launch("matvec", hidden, head, logits, VOCABULARY, WIDTH)
            if not self.cuda.capturing:
                self.cuda.synchronize()
        return CausalLMOutputWithPast(**{"logits": logits, name: cache})


class _Gpu(Gpu):
    """What moves a tensor waits for the kernels before, as torch's stream has it."""

    cuda: StandInCuda

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.cuda.synchronize()
        return super().moved(tensor)

    def _copied(self, tensor: torch.Tensor, how: str) -> None:
        self.cuda.synchronize()
        super()._copied(tensor, how)


class StandInCuda:
    """The parts of `torch.cuda` that a capture and a launch use."""

    def __init__(self, library: str) -> None:
        from tests.support.driver import calling  # needs cuda-bindings, which the tests lack

        self._call = calling.call
        self.gpu = _Gpu()
        self.gpu.cuda = StepModel.cuda = self
        self.gpu.install()
        transformers.StepModel = StepModel  # type: ignore[attr-defined]
        calling.use(DEVICE.index)
        self._calls, self.capturing = GraphCalls(), False
        self._streams = [calling.stream()]
        self._library = ctypes.CDLL(library)  # mapped, as an installed one is
        data = Path(library).with_suffix(".images").read_bytes()
        self._functions = {}
        while data:
            (nbytes,) = struct.unpack_from("<Q", data)
            owner = self._call("cuLibraryLoadData", data[8 : 8 + nbytes], [], [], 0, [], [], 0)
            (kernel,) = self._call("cuLibraryEnumerateKernels", 1, owner)
            name = self._call("cuKernelGetName", kernel).decode()
            self._functions[name] = self._call("cuKernelGetFunction", kernel)
            data = data[8 + nbytes :]
        replaced: Any = torch.cuda
        for name in ("stream", "graph", "use_mem_pool", "synchronize", "MemPool", "CUDAGraph"):
            setattr(replaced, name, getattr(self, name))
        replaced.Stream = replaced.current_stream = lambda *_: types.SimpleNamespace(
            cuda_stream=int(self._streams[-1]), synchronize=self.synchronize
        )
        own: Any = torch._C
        own._cuda_customAllocator = lambda *pointers: pointers

    def synchronize(self, *_: object) -> None:
        if not self.capturing:
            self._call("cuStreamSynchronize", self._streams[-1])

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.gpu.holds(tensor) else self.gpu.moved(tensor)

    def empty(self, *size: int) -> torch.Tensor:
        found: torch.Tensor = torch.empty_strided(
            size, (size[1] * size[2], size[2], 1), device=DEVICE
        )
        return found

    def launch(self, name: str, *given: torch.Tensor | int) -> None:
        """Queue a kernel of one block on the current stream."""
        packed = [
            struct.pack("<Q", each.data_ptr())
            if isinstance(each, torch.Tensor)
            else struct.pack("<i", each)
            for each in given
        ]
        kept = [ctypes.create_string_buffer(each, 8) for each in [*packed, bytes(8), bytes(8)]]
        places = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        how = (1, 1, 1, BLOCK, 1, 1, 0, self._streams[-1], ctypes.addressof(places), 0)
        self._call("cuLaunchKernel", self._functions[name], *how)

    # -- as torch.cuda has them --------------------------------------------------------------------

    @contextlib.contextmanager
    def stream(self, _: object) -> Iterator[None]:
        yield

    class CUDAGraph:
        """A graph that is kept."""

        def __init__(self, *, keep_graph: bool) -> None:
            assert keep_graph
            self.raw = 0

        def raw_cuda_graph(self) -> int:
            return self.raw

    @contextlib.contextmanager
    def graph(self, made: Any, *, pool: Any, stream: Any) -> Iterator[None]:
        with self.use_mem_pool(pool):
            self._calls.capture_begin(stream.cuda_stream)
            self.capturing = True
            try:
                yield
            finally:
                self.capturing = False
                made.raw = self._calls.capture_end(stream.cuda_stream)

    class MemPool:
        """Takes each tensor's memory from an allocator."""

        made: Any = None

        def __init__(self, pointers: Any) -> None:
            kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
            self.allocate, self.id = kind(pointers[0]), self

    @contextlib.contextmanager
    def use_mem_pool(self, pool: Any) -> Iterator[None]:
        before = self.gpu.allocate
        self.gpu.allocate = lambda nbytes: Owner(pool.allocate(nbytes, DEVICE.index, None))
        try:
            yield
        finally:
            self.gpu.allocate = before
