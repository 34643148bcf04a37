"""Builds a model before its weights arrive: transformers itself does, of pending tensors.

`from_pretrained` gets a state dict of `Pending`s. So names are mapped, weights converted, cast and
tied, and buffers computed, by the same code as for a checkpoint on disk; only the values come
later.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.utils import logging as transformers_logging

from mx.core.layout import contiguous_strides
from mx.core.types import DTYPE_BITS, Manifest
from mx.engines.transformers.described import ModelDescription
from mx.engines.transformers.pending import Pending, Value, Values
from mx.engines.transformers.tested import warn_if_untested
from mx.errors import ConfigError
from mx.memory.tensors import torch_form
from mx.text import listed, plain

log = logging.getLogger(__name__)

#: Building changes what is global in torch and transformers (the default dtype, progress bars).
_one_at_a_time = threading.Lock()


def build(
    name: str,
    description: ModelDescription,
    manifest: Manifest,
    *,
    strict: bool,
    options: Mapping[str, Any],
    device: str = "cpu",
) -> tuple[Any, Values]:
    """Build a model of pending tensors, and compare it with the weights that will come.

    Args:
        name: The model's name, for errors.
        description: The model's configuration and class.
        manifest: The description of the weights.
        strict: Refuse weights that lack some of the model's tensors, or have others.
        options: More arguments of `from_pretrained`.
        device: Where the model will be, as torch names it.

    Returns:
        The model, in evaluation mode, and the values that its pending tensors wait for.

    Raises:
        ConfigError: The weights do not fit the model; the error has all differences. Or
            transformers can't build it.
    """
    warn_if_untested()
    values = Values(_same_bytes(manifest), device)
    weights = _pending(manifest, values)
    if description.generation is not None:
        options = {"generation_config": description.generation, **options}
    built = _Class(description.model_class, name, strict=strict)
    with _one_at_a_time, _quiet():
        try:
            from_pretrained: Any = PreTrainedModel.from_pretrained
            model = from_pretrained.__func__(
                built, None, config=description.config, state_dict=weights, **options
            )
        except ConfigError:
            raise
        except Exception as error:  # transformers raises anything for a configuration
            raise ConfigError(
                f"transformers can't build {description.model_class.__name__} for {name}: "
                f"{type(error).__name__}: {plain(str(error))[:500]}",
                hint="its config.json does not fit, or mx does not support this model yet",
            ) from error
    if device != "cpu":
        _move_rest(model, values.device)
    return model, values


def _move_rest(model: Any, device: torch.device) -> None:
    """Move the tensors that are not pulled to the device: computed buffers and initialised
    weights."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for entries in (module._parameters, module._buffers):
            for name, tensor in entries.items():
                if tensor is None or isinstance(tensor, Pending):
                    continue
                if id(tensor) not in moved:
                    there = tensor.detach().to(device)
                    parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = (
                        torch.nn.Parameter(there, tensor.requires_grad) if parameter else there
                    )
                entries[name] = moved[id(tensor)]


class _Class:
    """A model class as `from_pretrained` uses it, that compares the weights with the model before
    memory is allocated for those that are missing."""

    def __init__(self, model_class: Any, name: str, *, strict: bool) -> None:
        self._model_class = model_class
        self._name = name
        self._strict = strict

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model_class, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _WithoutInit():
            return self._model_class(*args, **kwargs)

    def _load_pretrained_model(
        self, model: Any, weights: dict[str, Pending], files: Any, load_config: Any, *more: Any
    ) -> Any:
        plain = _plain(model, weights, load_config)
        others = {name: tensor for name, tensor in weights.items() if name not in plain}
        found = self._model_class._load_pretrained_model(model, others, files, load_config, *more)
        _place(model, plain)
        found[0].missing_keys -= plain.keys()
        return found

    def _finalize_model_loading(self, model: Any, load_config: Any, info: Any) -> Any:
        found = list(_differences(model, info, strict=self._strict))
        if found:
            raise ConfigError(
                f"the weights of {self._name} do not fit {type(model).__name__}, and none were "
                "moved: " + "; ".join(found),
                hint="its config.json may be another model's; `model_class` names another class"
                + (", `strict=False` does as from_pretrained does" if self._strict else ""),
            )
        return self._model_class._finalize_model_loading(model, load_config, info)


class _WithoutInit(TorchFunctionMode):
    """Skips the random initialisation of tensors on the meta device, which has no effect."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _INIT:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_INIT = frozenset(
    [
        torch.nn.init.kaiming_uniform_,
        torch.nn.init.uniform_,
        torch.nn.init.normal_,
        torch.Tensor.uniform_,
        torch.Tensor.normal_,
    ]
)


def _plain(model: Any, weights: Mapping[str, Pending], load_config: Any) -> dict[str, Pending]:
    """Return the weights that transformers takes as they are: neither renamed, nor converted, nor
    cast. It spends half a millisecond on each."""
    mapping = load_config.weight_mapping or []
    simple = {WeightRenaming, WeightConverter, PrefixChange}
    if load_config.dtype_plan or not simple.issuperset(map(type, mapping)):
        return {}  # which depend on the other names, or on patterns
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    known = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    prefix = model.base_model_prefix
    found = {}
    for name, tensor in weights.items():
        place, meta = known.get(name), tensor.mx_value.meta
        if place is None or place.shape != meta.shape or place.dtype != meta.dtype:
            continue
        if rename_source_key(name, renamings, converters, prefix, known) == (name, None):
            found[name] = tensor
    return found


def _place(model: Any, plain: Mapping[str, Pending]) -> None:
    """Put weights into a model as `from_pretrained` does."""
    modules = dict(model.named_modules(remove_duplicate=False))
    touched = {}
    for name, tensor in plain.items():
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        tensor._is_hf_initialized = True  # else it would be initialised
        if leaf in module._parameters:
            tensor._is_param = True
            with torch._C.DisableTorchFunctionSubclass():  # as there are many
                tensor.requires_grad = tensor.mx_value.meta.dtype.is_floating_point
            if "_flat_weights" in module.__dict__:  # a recurrent module keeps a list of them, too
                setattr(module, leaf, tensor)
            else:
                module._parameters[leaf] = tensor
        else:
            module._buffers[leaf] = tensor
        touched[path] = module
    for module in touched.values():
        own = [each for each in module._parameters.values() if each is not None]
        if not (module._buffers or module._modules) and all(isinstance(p, Pending) for p in own):
            module._is_hf_initialized = True


def _differences(model: Any, info: Any, *, strict: bool) -> Iterator[str]:
    """Yield what differs between a model and its weights."""
    for key, here, there in sorted(info.mismatched_keys):
        yield f"{key} is {list(there)} in the model, {list(here)} in the weights"
    for key, error in sorted(info.conversion_errors.items()):
        reason = plain(error.strip().rpartition("\n")[2])[:200]
        yield f"{key} can't be converted ({reason})"
    if not strict:
        return
    missing = set(info.missing_keys)
    tied: dict[str, set[str]] = {}
    for target, source in model.all_tied_weights_keys.items():
        tied.setdefault(source, {source}).add(target)
    for group in tied.values():
        if not group <= missing:
            missing -= group
    if not missing and not info.unexpected_keys:
        return
    kept = info.missing_keys, info.unexpected_keys
    info.missing_keys, info.unexpected_keys = missing, set(info.unexpected_keys)
    model._adjust_missing_and_unexpected_keys(info)
    missing, unexpected = info.missing_keys, info.unexpected_keys
    info.missing_keys, info.unexpected_keys = kept
    if missing:
        yield f"missing in the weights: {listed(sorted(missing))}"
    if unexpected:
        yield f"not in the model: {listed(sorted(unexpected))}"


def _same_bytes(manifest: Manifest) -> Any:
    """Return a function that returns whether two tensors, by name, have the same bytes."""
    known: dict[str, Any] = {}

    def same(one: str, other: str) -> bool:
        if not known:
            names = [tensor.name for tensor in manifest.layout.tensors]
            known.update(zip(names, manifest.roots, strict=True))
            for alias in manifest.layout.aliases:
                place = (alias.offset_bytes, alias.shape, alias.stride)
                known[alias.name] = (known[alias.target], place)
        return bool(known[one] == known[other])

    return same


def _pending(manifest: Manifest, values: Values) -> dict[str, Pending]:
    """Return a pending tensor for each tensor of the weights."""
    found = {}
    layout = manifest.layout
    forms: dict[Any, torch.Tensor] = {}
    for name, dtype, shape, stride in [
        *((t.name, t.dtype, t.shape, t.stride) for t in layout.tensors),
        *((a.name, a.dtype, a.shape, a.stride) for a in layout.aliases),
    ]:
        meta = forms.get((dtype, shape, stride))
        if meta is None:
            torch_dtype, torch_shape = torch_form(dtype, shape)
            if DTYPE_BITS[dtype] < 8 and torch_dtype is torch.uint8:
                raise ConfigError(
                    f"{name} is {dtype}, which torch has no dtype for",
                    hint="serve weights that are not quantised",
                )
            meta = torch.empty_strided(
                torch_shape,
                stride or contiguous_strides(torch_shape),
                dtype=torch_dtype,
                device="meta",
            )
            forms[dtype, shape, stride] = meta
        found[name] = Pending.of(values, Value(meta, frozenset([name]), name), meta)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the progress bar of loading, which would end before anything was loaded."""
    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    bars: Any = transformers_logging
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
