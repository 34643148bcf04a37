"""The processing keys of what a rank of vLLM holds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from mx.core.variant import ProcessingKey, shortened
from mx.engines.replica.keys import fields_of, short
from mx.engines.replica.run import PROCESSED

#: Versions whose loading was tried; others are used with a warning.
KNOWN = ("0.32",)
#: Parts of the names of variables that say nothing about the form of tensors.
_ELSEWHERE = (
    "CACHE", "CPU_OMP", "DEBUG", "DEVICES", "DIR", "HOST", "ID", "LOG", "PATH", "PORT", "RANK",
    "SERVER", "THREADS", "TIMEOUT", "URL", "V1_MULTIPROCESSING", "WORKER",
)  # fmt: skip
#: Options of multimodal models that decide which modules are built, and how they are cut.
_MULTIMODAL = (
    "language_model_only", "mm_encoder_only", "mm_encoder_tp_mode", "mm_encoder_attn_dtype",
)  # fmt: skip
#: The longest value of a field that is written as it is.
_MOST_CHARS = 60


def engine_version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(vllm.__version__)


def is_known(engine: str) -> bool:
    """Return True for a version of vLLM that mx was tried with."""
    return ".".join(engine.split(".")[:2]) in KNOWN


def key_of(vllm_config: Any, ranks: Mapping[str, tuple[int, int]], state: str) -> ProcessingKey:
    """Return the key of one rank's tensors.

    Args:
        vllm_config: The engine's configuration.
        ranks: By axis ("tp", "pp", "dp") the rank and the size.
        state: "loaded" for the tensors before vLLM processes them, "processed" for those after.

    Raises:
        Exception: A key can't represent this version or platform of vLLM.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    fields = fields_of("vllm", engine_version(), model, ranks, state)
    fields |= _built(model) | _stages(model, ranks["pp"][1])
    fields["cache"] = _cache(vllm_config.cache_config)
    if getattr(parallel, "enable_expert_parallel", False):
        placed = getattr(parallel, "expert_placement_strategy", "linear")
        fields["experts"] = "parallel" if placed == "linear" else placed
    if ranks["dp"][1] > 1 and getattr(model, "is_moe", True):
        fields["dp"] = "{}/{}".format(*ranks["dp"])  # each is a bundle of its own
    if state == PROCESSED:
        fields["device"] = _device()
        fields["kernels"] = short([vllm_config.kernel_config.compute_hash(), _environment()])
    return shortened(fields)


def _built(model: Any) -> dict[str, object]:
    """Return what decides, besides the checkpoint's own configuration, which modules vLLM builds.

    Fields are there only where they are not what most engines have: keys are short.
    """
    runner = getattr(model, "runner_type", "generate")
    convert = getattr(model, "convert_type", "none")
    used = getattr(model, "architecture", "")
    named = getattr(model.hf_config, "architectures", None) or []
    found: dict[str, object] = {
        "runner": None if runner == "generate" else runner,
        "convert": None if convert == "none" else convert,
        "class": used if used not in named else None,  # by model_impl, or by an override
    }
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        told = {name: str(getattr(multimodal, name, "")) for name in _MULTIMODAL}
        # vLLM builds no encoder for what a prompt may have none of; other limits change no module.
        limits = getattr(multimodal, "limit_per_prompt", {})
        none = sorted(name for name in limits if not multimodal.get_limit_per_prompt(name))
        found["multimodal"] = short([told, none])
    return found


def _cache(cache: Any) -> str | None:
    """Return the type of cached keys and values, whose scales are among the weights; None for the
    model's own."""
    dtype = str(getattr(cache, "cache_dtype", "auto"))
    if dtype == "auto":
        return None
    skipped = sorted(set(getattr(cache, "kv_cache_dtype_skip_layers", ())))
    return f"{dtype}-{short(skipped)}" if skipped else dtype


def _stages(model: Any, count: int) -> dict[str, object]:
    """Return how many layers each pipeline stage has, which VLLM_PP_LAYER_PARTITION may say."""
    if count == 1:
        return {}
    from vllm.distributed.utils import get_pp_indices

    layers = model.get_total_num_hidden_layers()
    stages = [get_pp_indices(layers, rank, count) for rank in range(count)]
    text = "-".join(str(end - begin) for begin, end in stages)
    return {"stages": text if len(text) < _MOST_CHARS else short(stages)}


def _environment() -> dict[str, str]:
    """Return the variables that choose kernels, and with them the form of processed tensors."""
    from vllm import envs

    return {
        name: str(value)
        for name, value in envs.compile_factors().items()
        if name.startswith("VLLM_") and not any(part in name for part in _ELSEWHERE)
    }


def _device() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return f"cpu-{platform.machine()}"
    capability = current_platform.get_device_capability()  # None where a platform has no such thing
    version = "any" if capability is None else capability.as_version_str()
    return f"{current_platform.device_type}-{version}"
