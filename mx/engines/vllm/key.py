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
    if getattr(parallel, "enable_expert_parallel", False):
        fields["experts"] = "parallel"
    if ranks["dp"][1] > 1 and getattr(model, "is_moe", True):
        fields["dp"] = "{}/{}".format(*ranks["dp"])  # each is a bundle of its own
    if state == PROCESSED:
        fields["device"] = _device()
        fields["kernels"] = short([vllm_config.kernel_config.compute_hash(), _environment()])
    return shortened(fields)


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
