"""What transformers makes of a checkpoint (other dtypes, fused experts), as a variant that the
processes of one host share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mx import config
from mx.core.packaging import ADAPTER
from mx.core.variant import ProcessingKey
from mx.engines.transformers.lookup import ServedModel
from mx.errors import ConfigError
from mx.fleet import pull_offered
from mx.wire.cache import CachedModelAddress

if TYPE_CHECKING:
    import torch

#: Arguments that change no weights.
_NEUTRAL = frozenset(
    {
        "_from_auto",
        "_from_pipeline",
        "adapter_kwargs",
        "attn_implementation",
        "cache_dir",
        "config",
        "dtype",
        "local_files_only",
        "low_cpu_mem_usage",
        "output_loading_info",
        "proxies",
        "revision",
        "subfolder",
        "token",
        "torch_dtype",
        "trust_remote_code",
        "use_safetensors",
        "weights_only",
    }
)
#: Fields of a configuration that change no weights.
_NOT_OF_WEIGHTS = ("_name_or_path", "name_or_path", "transformers_version", "use_cache")
#: Less than this is not worth a variant of its own.
_WORTH_BYTES = 1 << 20


def key_of(
    cls: Any, found: ServedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any], version: str
) -> ProcessingKey | None:
    """Return the key of what a call of `from_pretrained` makes; None if processes can't share it.

    Args:
        cls: The model's class.
        found: The checkpoint.
        args: Positional arguments beside the name.
        kwargs: Arguments by name.
        version: The version of transformers.
    """
    given = {name for name, value in kwargs.items() if value is not None}
    dtype = kwargs.get("dtype") if kwargs.get("dtype") is not None else kwargs.get("torch_dtype")
    if args or given - _NEUTRAL or isinstance(dtype, dict):
        return None
    # Where PEFT is installed an `Auto` class always says by what it looked for an adapter.
    adapter = {n for n, v in (kwargs.get("adapter_kwargs") or {}).items() if v is not None}
    if adapter - {"revision", "token"} or (found.folder / ADAPTER).exists():
        return None
    given_config = kwargs.get("config")
    if given_config is not None and not hasattr(given_config, "to_dict"):
        return None  # a path, behind which there may be anything
    if not cls.__module__.startswith("transformers."):  # another class may have the same name
        return None
    import torch

    try:
        return ProcessingKey(
            engine="transformers",
            transformers=version,
            dtype="" if dtype in (None, "auto") else dtype,
            torch=torch.__version__,
            model_class=cls.__name__,
            config="" if given_config is None else _digest_of(given_config),
            checkpoint=found.pinned.rpartition("@")[2][:32],  # the files too: they configure it
        )
    except ConfigError:  # a dtype without a name of its own
        return None


def _digest_of(given: Any) -> str:
    fields = {name: v for name, v in given.to_dict().items() if name not in _NOT_OF_WEIGHTS}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def why_not(model: Any, info: Mapping[str, Any], memory: range) -> str:
    """Return why a model's tensors are not lent to other processes; "" if they are.

    Args:
        model: The model.
        info: The loading info that transformers returns.
        memory: The addresses of the checkpoint's own tensors.
    """
    for problem in ("missing_keys", "mismatched_keys", "error_msgs"):
        if info.get(problem):
            return f"{problem}: what the checkpoint lacks was initialised here"
    if not memory:
        return "the checkpoint is not in this host's memory"
    tensors = model.state_dict()
    if any(tensor.device.type != "cpu" for tensor in tensors.values()):
        return "it is not in the host's memory"
    if getattr(model, "hf_quantizer", None) is not None:
        return "it is quantised"
    made = sum(each.nbytes for each in tensors.values() if each.data_ptr() not in memory)
    return "" if made >= _WORTH_BYTES else "nothing was converted"


def adopt(model: Any, held: CachedModelAddress, settings: config.Settings) -> None:
    """Replace a model's tensors by views of the cache's copy, which frees their own memory.

    Raises:
        MxError: The copy can't be attached.
    """
    with pull_offered(held, settings) as running:
        report = running.wait()
        if any(path.attached for path in report.paths):
            _point_to(model, running.state_dict())


def _point_to(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        ours = tensors.get(name)
        if ours is not None and (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape):
            tensor.data = ours
