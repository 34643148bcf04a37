"""The state of weights that vLLM has processed: which models have it, and how to take it over."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch

import mx
from mx.engines.replica import registries
from mx.engines.replica.run import LOADED, PROCESSED
from mx.engines.replica.tensors import cannot_move, check, replace, slots_of
from mx.errors import ConfigError

log = logging.getLogger(__name__)


def on_cpu() -> bool:
    """Return True if this is vLLM for CPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def states(wanted: str, vllm_config: Any) -> list[str]:
    """Return the states that this engine may take, best first.

    Args:
        wanted: The option `state`.
        vllm_config: The engine's configuration.
    """
    if wanted == "checkpoint":
        return []
    if getattr(vllm_config.parallel_config, "enable_eplb", False):
        log.warning("experts move between ranks (EPLB): only checkpoints are taken, none is lent")
        return []
    if wanted in (LOADED, PROCESSED):
        return [wanted]
    return [LOADED] if on_cpu() else [PROCESSED, LOADED]


def unsupported(model: torch.nn.Module) -> str:
    """Return why vLLM can't take over the processed weights of this model, or ""."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and not method.supports_pre_processed_weights:
            return f"{type(method).__name__} of {name or 'the model'} can't take processed weights"
    return ""


def cannot_lend(model: torch.nn.Module) -> str:
    """Return why a model's processed tensors can't be lent, or ""."""
    if why := unsupported(model):
        return why
    slots = slots_of(model, non_persistent=True)
    if bad := cannot_move(slots):
        return f"{bad} has no values"
    empty = [n for n, s in slots.items() if (t := s.get()) is not None and not t.numel()]
    if empty:
        return (
            f"vLLM has moved the weights of {len(empty)} tensors into memory of its own, "
            f"such as {empty[0]}"
        )
    return ""


@contextlib.contextmanager
def plain_linears(plain: bool) -> Iterator[None]:
    """Have vLLM for CPUs compute linear layers from their own weights.

    Otherwise it repacks them into memory that nothing but its kernel can read.

    Args:
        plain: False changes nothing.
    """
    if not plain:
        yield
        return
    from vllm.model_executor.layers import utils

    def keep(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", keep):
        yield


def undone_unless_kept(
    vllm_config: Any, device: torch.device
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Return a context in which a model is built; see `registries.undone_unless_kept`.

    The module of the model's class is imported before: where it makes tensors of its own, they are
    those of the ordinary loader, and not undone.

    Args:
        vllm_config: The engine's configuration.
        device: Where the engine computes.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_default_torch_dtype(vllm_config.model_config.dtype), device:
        utils.get_model_architecture(vllm_config.model_config)
    owners = [vllm_config.compilation_config, vllm_config.quant_config]
    return registries.undone_unless_kept("vllm", *(each for each in owners if each is not None))


def build(
    vllm_config: Any,
    pull: mx.Pull,
    made: Mapping[str, torch.Tensor] | None,
    device: torch.device,
    plain: bool,
) -> torch.nn.Module:
    """Return a model made of tensors that another replica has processed.

    Args:
        vllm_config: The engine's configuration.
        pull: The pull of the tensors, which runs meanwhile.
        made: The tensors that it fills, and gives back; None if it makes them.
        device: Where the engine computes.
        plain: As for `plain_linears`.

    Raises:
        ConfigError: The tensors do not fit the model, or vLLM can't take them.
        MxError: The error that ended the pull.
    """
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.utils import weights_already_processed
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = vllm_config.model_config
    with set_default_torch_dtype(config.dtype):
        with torch.device("meta"):
            model = utils.initialize_model(vllm_config=vllm_config, model_config=config)
        if why := unsupported(model):
            raise ConfigError(why)
        if config.quantization is None and not getattr(config, "is_moe", False):
            check(pull.wait_manifest(), slots_of(model, non_persistent=True))
        arrived = pull.state_dict()
        if made is not None:
            pull.release()  # they are the engine's alone from now on
        replace(model, arrived if made is None else made, device)
        with plain_linears(plain), weights_already_processed():
            utils.process_weights_after_loading(model, config, device)
    if left := cannot_move(slots_of(model, non_persistent=True)):
        raise ConfigError(f"the replica that lends these weights has no {left}")
    return model.eval()  # type: ignore[no-any-return]


def cannot_wake(vllm_config: Any) -> str:
    """Return why more than a model's processed tensors is lost when sleep discards weights, or "".

    Args:
        vllm_config: The engine's configuration.
    """
    for what, held in (
        ("quantisation keeps more", vllm_config.model_config.quantization),
        ("adapters (LoRA) are", getattr(vllm_config, "lora_config", None)),
        ("a draft model is", getattr(vllm_config, "speculative_config", None)),
    ):
        if held is not None:
            return f"{what} beside the weights, which no peer has"
    return ""


def process_again(model: torch.nn.Module, vllm_config: Any) -> None:
    """Have vLLM make anew what its attention derives from weights, where these were filled again.

    Args:
        model: The model.
        vllm_config: The engine's configuration.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    with set_current_vllm_config(vllm_config):
        for layer in filter(is_deferred_attention_layer, model.modules()):
            layer.process_weights_after_loading(vllm_config.model_config.dtype)
