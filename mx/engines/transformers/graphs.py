"""CUDA graphs of a decode step over a static cache: a publisher captures one, replicas launch it.

    # what `mx artifacts record` runs:
    python -m mx.engines.transformers.graphs llama-8b batch=1 positions=2048

    model = load("llama-8b", device="cuda:0", graphs=Decode(), trust="trust.toml")
    model.generate(**tokens, past_key_values=decoding(model).cache(), disable_compile=True)

The step is the model's own `forward`, as `generate` calls it for each token after the first.
"""

from __future__ import annotations

import functools
import inspect
import logging
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import StaticCache, __version__
from transformers.cache_utils import StaticLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from mx import api, config, graphs
from mx.core.layout import kind_nbytes
from mx.core.types import Manifest
from mx.engines.transformers.loader import configuration_of, load, loading
from mx.errors import ConfigError, MxError
from mx.graphs.functions import mapped_libraries
from mx.graphs.package import GraphPlace
from mx.graphs.tensors import RegionTensor
from mx.memory.tensors import TORCH_DTYPES, alias_view, bytes_of
from mx.units import GIB
from mx.views import DeviceView

log = logging.getLogger(__name__)

#: What transformers calls a cache: 5.24 has renamed it.
_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
#: Arguments of `forward` besides tensors and the cache, with which a step computes the same.
_USUAL = {"use_cache": True, "return_dict": True, "logits_to_keep": 1}
#: What a step writes of a layer's cache; it counts in the rest.
_RESULTS = ("keys", "values")
_BUFFER = "buffer:"
_LIBRARIES = ("libtorch_cuda.so", "libcublas.so", "libcublasLt.so")
_WARM_UPS = 3
#: Much of it has no types.
_cuda: Any = torch.cuda


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step: the next token of `batch` sequences, with a cache of `positions` tokens."""

    batch: int = 1
    positions: int = 2048

    @property
    def name(self) -> str:
        """What its graph is called in a set."""
        return f"decode.{self.batch}x{self.positions}"

    def begin(self, model: Any) -> Decoding:
        """Have a model, whose weights have not arrived, decode by the graph if there is one."""
        made = _decodings[model] = Decoding(model, self)
        reference, plain = weakref.ref(model), type(model).forward

        @functools.wraps(plain)
        def forward(*given: Any, **named: Any) -> Any:
            found = None if given else made.replay(named)
            return plain(reference(), *given, **named) if found is None else found

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        model.forward = forward
        return made


class DecodeStep:
    """A model's decode step, and the static cache that it is computed with."""

    def __init__(self, model: Any, decode: Decode) -> None:
        self.model, self.batch = weakref.ref(model), decode.batch
        self.cache: Any = StaticCache(config=model.config, max_cache_len=decode.positions)

    def example(self, token: int, length: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a call for a token behind `length` tokens whose keys are zeros."""
        model: Any = self.model()
        if any(type(each) is not StaticLayer for each in self.cache.layers):
            raise ConfigError("only layers that attend to all tokens are captured in this version")
        self.cache.reset()
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
        ids = (torch.arange(self.batch) + token) % model.config.get_text_config().vocab_size
        found = model.prepare_inputs_for_generation(
            ids[:, None].to(model.device),
            position_ids=torch.full((self.batch, 1), length).to(model.device),
            attention_mask=torch.ones((self.batch, length + 1), dtype=torch.int64).to(model.device),
            next_sequence_length=1,
            use_cache=True,
            **{_CACHE: self.cache},
        )
        return _flat(found)

    def run(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Compute logits without a graph."""
        model: Any = self.model()
        given: dict[str, Any] = {_CACHE: self.cache, "use_cache": True}
        for name, tensor in tensors.items():
            argument, _, key = name.partition(":")
            given[argument] = given.get(argument, {}) | {key: tensor} if key else tensor
        found = type(model).forward(model, **given)
        if {name for name, each in found.items() if each is not None} != {"logits", _CACHE}:
            raise ConfigError(f"{type(model).__name__} gives more than logits and its cache")
        logits: torch.Tensor = found.logits
        return logits

    def state(self, *, results: bool) -> dict[str, torch.Tensor]:
        """Return the cache's tensors, "0.keys": those that a step writes, or those it counts in."""
        return {
            f"{number}.{name}": each
            for number, layer in enumerate(self.cache.layers)
            for name, each in vars(layer).items()
            if isinstance(each, torch.Tensor) and (name in _RESULTS) == results
        }

    def lie_in(self, views: Mapping[str, torch.Tensor]) -> None:
        """Have the cache's tensors of these names, and the model's buffers, be these."""
        for number, layer in enumerate(self.cache.layers):
            for name in vars(layer).copy():
                if f"{number}.{name}" in views:
                    setattr(layer, name, views[f"{number}.{name}"])
        for name, buffers, key in _buffers(self.model()):
            if name in views:
                buffers[key] = views[name].copy_(buffers[key])


def _flat(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return all tensors of a call, those of a mask for each kind of layer as "NAME:KIND"."""
    masks = {n: each for n, each in given.items() if isinstance(each, dict)}
    flat = {f"{n}:{kind}": each for n, mask in masks.items() for kind, each in mask.items()}
    found = [*given.items(), *flat.items()]
    return {name: each for name, each in found if isinstance(each, torch.Tensor)}


def _buffers(model: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the name of each buffer as a graph has it, and where it is."""
    for path, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None:
                yield f"{_BUFFER}{path}.{key}", module._buffers, key


def _view(tensor: RegionTensor, device: str, owner: object) -> torch.Tensor:
    """Return a tensor of torch in a region, which keeps `owner`."""
    view = DeviceView(device, tensor.address, tensor.nbytes, owner)
    return bytes_of(view, 0, tensor.nbytes).view(TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


def _bytes(tensor: torch.Tensor) -> bytes:
    found: bytes = tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return found


def _environment(model: Any) -> dict[str, str]:
    versions = {"engine": f"transformers {__version__}", "torch": str(torch.__version__)}
    return versions | {"configuration": configuration_of(model)}


def products(model: Any, batch: int) -> list[graphs.EagerCall]:
    """Return what loads the kernels that cuBLAS makes as it runs: products of all layers' forms."""
    library = next((p for p in mapped_libraries() if p.name.startswith(_LIBRARIES[-1])), None)
    forms = {
        (each.out_features, each.in_features, each.weight.dtype, each.bias is not None)
        for each in model.modules()
        if isinstance(each, torch.nn.Linear)
    }
    device = model.device

    def run(stream: int) -> None:
        with _cuda.stream(_cuda.ExternalStream(stream)), torch.no_grad():
            for rows, columns, dtype, biased in forms:
                sizes = [(batch, 1, columns), (rows, columns), *([(rows,)] if biased else [])]
                given = [torch.empty(size, dtype=dtype, device=device) for size in sizes]
                torch.nn.functional.linear(*given)

    return [] if library is None else [graphs.EagerCall("products", library, run)]


# -- a replica -------------------------------------------------------------------------------------


class Decoding:
    """How a model decodes: what `decoding(model)` returns.

    `reason` says why without a graph, "" while one is used, or may be.
    """

    def __init__(self, model: Any, decode: Decode) -> None:
        self.reason = ""
        self._model, self._decode = weakref.ref(model), decode
        self._graph: graphs.RestoredGraph | None = None
        self._views: dict[str, torch.Tensor] = {}
        self._step: DecodeStep | None = None
        self._places: dict[str, int] = {}

    def find(
        self, name: str, manifest: Manifest | None, device: str, settings: config.Settings
    ) -> dict[str, torch.Tensor]:
        """Restore the graph.

        Args:
            name: The model's name.
            manifest: The description of its weights; None for those of a disk.
            device: The GPU, as torch names it.
            settings: Settings of mx.

        Returns:
            Where the weights have to be, by name; empty without a graph. Raises nothing.
        """
        if manifest is None or not settings.trust:
            said = "no trust file is named: give `trust`"
            return self._eagerly(said if manifest else "the weights are not a peer's")
        try:
            return self._found(name, manifest, device, settings)
        except Exception as error:  # noqa: BLE001 - the model decodes all the same
            return self._eagerly(_why(error))

    def _found(
        self, name: str, manifest: Manifest, device: str, settings: config.Settings
    ) -> dict[str, torch.Tensor]:
        wanted, model, pin = self._decode.name, self._model(), manifest.ref.identity.hex()
        found = graphs.find(name, pin=pin, trust=settings.trust, settings=settings)
        if wanted not in found.graphs:
            said = [f"the set {found.set_id[:8]} has no graph {wanted}"] if found.graphs else []
            return self._eagerly("; ".join([*said, *found.reasons]))
        graph = graphs.restore(
            found.graphs[wanted].message,
            found.graphs[wanted].image,
            device=device,
            pin=pin,
            environment=_environment(model),
            calls=products(model, self._decode.batch),
        )
        # Its memory is open as long as there is a tensor in it, such as the model's parameters.
        owner = _GraphMemory()
        weakref.finalize(owner, graph.close).atexit = False
        if graph.reason:
            return self._eagerly(str(graph.reason), told=True)
        weights, layout = graph.tensors(), manifest.layout
        forms = {t.name: (t.dtype, t.shape) for t in layout.tensors}
        forms |= {alias.name: (alias.dtype, alias.shape) for alias in layout.aliases}
        pulled = {name: each for name, each in weights.items() if name in forms}
        if forms != {name: (each.dtype, each.shape) for name, each in pulled.items()}:
            return self._eagerly("the graph has other weights")
        every = weights | graph.inputs() | graph.outputs()
        self._views = {name: _view(each, device, owner) for name, each in every.items()}
        self._graph = graph
        log.info("%s will decode by a CUDA graph of %r, once it is proved", name, found.signer)
        return {name: self._views[name] for name in pulled}

    def cache(self) -> Any:
        """Return the static cache, empty, for new sequences: one call of `generate` at a time.

        Waits for all weights. The graph is proved at the first call; if the model was changed since
        (adapters, another device) it is not used any more.

        Raises:
            MxError: The weights can't come.
        """
        model = self._model()
        loading(model).wait()
        if self._step is None:
            self._step = DecodeStep(model, self._decode)
            self._prove(self._step)
        elif self._graph is not None and self._places != _places(model):
            self._eagerly("the model was changed")
        self._step.cache.reset()
        return self._step.cache

    @torch.no_grad()
    def _prove(self, step: DecodeStep) -> None:
        if self._graph is None:
            return
        try:
            step.run(step.example(0, 0))  # allocates the cache, and loads libraries
            given = step.example(-1, self._decode.positions // 2)
            inputs = {n: _bytes(each) for n, each in (given | step.state(results=False)).items()}
            results = {"logits": step.run(given)} | step.state(results=True)
            step.lie_in({n: v for n, v in self._views.items() if n.startswith(_BUFFER)})
            _cuda.synchronize()
            if not self._graph.prove(inputs, {n: _bytes(each) for n, each in results.items()}):
                self._eagerly(str(self._graph.reason), told=True)
                return
            step.lie_in(self._views)
            self._places = _places(self._model())
        except Exception as error:  # noqa: BLE001 - the model decodes all the same
            self._eagerly(_why(error))

    def replay(self, given: Mapping[str, Any]) -> Any:
        """Return what `forward` gives for these arguments, by the graph; None if it does not."""
        step, graph, views = self._step, self._graph, self._views
        if step is None or graph is None or torch.is_grad_enabled():
            return None
        tensors = _flat(given)
        taken = {name.partition(":")[0] for name in tensors}
        others = {n: each for n, each in given.items() if each is not None and n not in taken}
        if others.pop(_CACHE, None) is not step.cache or not others.items() <= _USUAL.items():
            return None
        counted = views["0.cumulative_length"]
        tensors.setdefault("position_ids", counted.expand(self._decode.batch, 1))
        wanted = {n: views[n] for n in graph.inputs() if "." not in n}
        if _forms(tensors) != _forms(wanted):
            return None
        for name, tensor in tensors.items():
            wanted[name].copy_(tensor)
        if not graph.launch(_cuda.current_stream(counted.device).cuda_stream):
            self._eagerly(str(graph.reason), told=True)
            return None
        return CausalLMOutputWithPast(**{"logits": views["logits"].clone(), _CACHE: step.cache})

    def _eagerly(self, why: str, *, told: bool = False) -> dict[str, torch.Tensor]:
        self.reason, self._graph, self._views = self.reason or why, None, {}
        if not told:
            log.warning("the model decodes without a CUDA graph: %s", why)
        return {}


def _why(error: Exception) -> str:
    return error.message if isinstance(error, MxError) else f"{type(error).__name__}: {error}"


class _GraphMemory:
    """What all tensors in a graph's memory keep."""


_decodings: weakref.WeakKeyDictionary[Any, Decoding] = weakref.WeakKeyDictionary()


def decoding(model: Any) -> Decoding:
    """Return how a model decodes that `load(..., graphs=)` has returned.

    Raises:
        ConfigError: It is something else.
    """
    found = _decodings.get(model)
    if found is None:
        raise ConfigError(
            f"this {type(model).__name__} was loaded without `graphs`", hint="give it to `load`"
        )
    return found


def _forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (each.dtype, each.shape) for name, each in tensors.items()}


def _places(model: Any) -> dict[str, int]:
    return {n: t.data_ptr() for n, t in (*model.named_parameters(), *model.named_buffers())}


# -- a publisher -----------------------------------------------------------------------------------


class _Capturing:
    """Puts all that a step uses into a region. `begin` and `find` are as those of a replica."""

    def __init__(self, region: graphs.Region) -> None:
        self._region, self._device = region, f"cuda:{region.device.ordinal}"
        self.weights: dict[str, torch.Tensor] = {}
        self.pin = ""
        self.environment: dict[str, str] = {}

    def begin(self, model: Any) -> _Capturing:
        self.environment = _environment(model)
        return self

    def find(self, _: str, manifest: Manifest | None, *__: object) -> dict[str, torch.Tensor]:
        assert manifest is not None
        self.pin, layout = manifest.ref.identity.hex(), manifest.layout
        self.weights = {t.name: self._place(t.dtype, t.shape) for t in layout.tensors}
        for alias in layout.aliases:
            self.weights[alias.name] = alias_view(self.weights[alias.target], alias)
        return self.weights

    def _place(self, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = kind_nbytes((dtype, shape, ()))
        offset = self._region.allocate(nbytes) - self._region.base
        place = GraphPlace("", 0, offset, nbytes, dtype, shape)
        return _view(self._region.tensor(place), self._device, self._region)

    def moved(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies in the region."""
        kinds = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        return {
            name: self._place(kinds[each.dtype], tuple(each.shape)).copy_(each)
            for name, each in tensors.items()
        }

    @torch.no_grad()
    def capture(self, model: Any, decode: Decode) -> graphs.Capture:
        """Return what this process captured. The weights have arrived."""
        step, region = DecodeStep(model, decode), self._region
        step.run(step.example(0, 0))
        inputs = self.moved(step.example(0, 0))
        results, counted = (self.moved(step.state(results=each)) for each in (True, False))
        buffers = {name: held[key] for name, held, key in _buffers(model)}
        buffers = self.moved(
            {n: t for n, t in buffers.items() if not region.has(t.data_ptr(), t.nbytes)}
        )
        step.lie_in(results | counted | buffers)
        _cuda.synchronize()
        pool, stream = region.pool(), _cuda.Stream()
        with _cuda.use_mem_pool(pool), _cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step.run(inputs)
            stream.synchronize()
        graph = _cuda.CUDAGraph(keep_graph=True)
        with _cuda.graph(graph, pool=pool.id, stream=stream):
            logits = step.run(inputs)
        step.cache.reset()
        _cuda.synchronize()
        mapped = [path for path in mapped_libraries() if path.name.startswith(_LIBRARIES)]
        return graphs.export(
            graph.raw_cuda_graph(),
            region,
            weights=self.weights | buffers,
            inputs=inputs | counted,
            outputs=results | {"logits": logits},
            libraries=mapped,
            calls=products(model, decode.batch),
            environment=self.environment,
            pin=self.pin,
        )


def capture(
    name: str,
    decode: Decode,
    *,
    decoys: bool = False,
    device: int | str = 0,
    scratch_nbytes: int = GIB,
    **options: Any,
) -> graphs.Capture:
    """Return what this process captures of a model's decode step, for `mx.graphs.combine`.

    Args:
        name: The model, which a source serves.
        decode: The step.
        decoys: True in the second process; see `mx.graphs.region`.
        device: The GPU, which nothing of this process has used yet.
        scratch_nbytes: How much memory there is for all but the weights: the cache above all.
        options: More arguments of `load`.

    Raises:
        GraphRefusedError: The step can't travel.
        MxError: The model can't be loaded, or needs more memory.
    """
    where = {each: options[each] for each in ("coordinator", "settings") if each in options}
    nbytes = api.plan(name, **where).nbytes + scratch_nbytes
    with graphs.region(nbytes, device=device, decoys=decoys) as region:
        made = _Capturing(region)
        model = load(
            name, device=f"cuda:{region.device.ordinal}", graphs=cast("Decode", made), **options
        )
        loading(model).wait()
        return made.capture(model, decode)


def main() -> None:
    """Capture a step in two processes, and keep it where `mx artifacts record` looks.

    The arguments are a model and words OPTION=VALUE: fields of `Decode`, options of `capture`.
    """
    try:
        name, *words = sys.argv[1:]
        options = dict(each.split("=", 1) for each in words)
        given: dict[str, Any] = {n: int(v) if v.isdecimal() else v for n, v in options.items()}
        decode = Decode(*(given.pop(n) for n in ("batch", "positions")))
    except (KeyError, ValueError):
        sys.exit("usage: python -m mx.engines.transformers.graphs MODEL batch=N positions=N ...")
    try:
        if out := given.pop("out", ""):
            Path(out).write_bytes(capture(name, decode, **given).to_bytes())
        else:
            graphs.record(_captured_twice(), decode.name)
    except MxError as error:
        sys.exit(f"error: {error}")


def _captured_twice() -> graphs.Package:
    with tempfile.TemporaryDirectory(prefix="mx-capture-") as folder:
        outs = [Path(folder, each) for each in ("0", "1")]
        for out in outs:
            command = [sys.executable, *sys.orig_argv[1:], f"out={out}", f"decoys={out.name}"]
            if subprocess.run(command, check=False).returncode:
                raise ConfigError("the step could not be captured", hint="what it said is above")
        return graphs.combine(*(graphs.Capture.from_bytes(out.read_bytes()) for out in outs))


if __name__ == "__main__":
    main()
