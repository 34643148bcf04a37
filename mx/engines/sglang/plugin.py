"""The plugin: SGLang calls `register` in each of its processes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

#: Where the options are in SGLang's `model_loader_extra_config`.
OPTIONS = "mx_peer"

_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
#: What writes to the weights.
_UPDATES = (
    "begin_weight_update",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)

_registered = False


def register() -> None:
    """Have SGLang ask mx for its loader. Idempotent. Nothing of mx runs afterwards."""
    global _registered
    if _registered:
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_LOADER, choose_loader, HookType.AROUND)
        for name in _UPDATES:
            HookRegistry.register(f"{_UPDATER}.{name}", before_update, HookType.BEFORE)
        release, resume = (f"{_UPDATER}.{each}_memory_occupation" for each in ("release", "resume"))
        HookRegistry.register(release, before_release, HookType.BEFORE)
        HookRegistry.register(resume, after_resume, HookType.AFTER)
        _registered = True
    except Exception as error:  # noqa: BLE001 - the engine must start
        log.warning("this version of SGLang has no place for mx's loader (%s)", error)


def choose_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Return mx's loader where its options are given, else SGLang's.

    Args:
        original: SGLang's own `get_model_loader`.
        load_config: Its configuration.
        model_config: The model's.
    """
    extra = load_config.model_loader_extra_config
    if not isinstance(extra, Mapping) or OPTIONS not in extra:
        return original(load_config, model_config)
    rest = {name: value for name, value in extra.items() if name != OPTIONS}
    plain = dataclasses.replace(load_config, model_loader_extra_config=rest)
    ordinary = original(plain, model_config)
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if type(ordinary) is not DefaultModelLoader or getattr(model_config, "is_draft_model", False):
        log.warning("%s loads this model: mx has no part in it", type(ordinary).__name__)
        return ordinary
    from mx.engines.sglang.loader import MxPeerLoader

    return MxPeerLoader(plain, extra[OPTIONS])


def before_update(*arguments: Any, **named: Any) -> None:
    """Stop lending: the engine is about to change its weights."""
    from mx.engines.sglang.loader import withdraw

    withdraw("an update")


def before_release(*arguments: Any, **named: Any) -> None:
    """Stop lending if the engine is about to free its weights."""
    if _about_weights(*arguments, **named):
        from mx.engines.replica.lender import ASLEEP
        from mx.engines.sglang.loader import withdraw

        withdraw(ASLEEP)


def after_resume(_: Any, *arguments: Any, **named: Any) -> None:
    """Lend the weights again that the engine has brought back. Those that it has not (without
    `--enable-weights-cpu-backup`) are others by now, and lending ends."""
    if _about_weights(*arguments, **named):
        from mx.engines.replica.lender import ASLEEP
        from mx.engines.sglang.loader import restore

        restore(ASLEEP)


def _about_weights(updater: Any, recv_req: Any) -> bool:
    """Return True if a request that has SGLang free or bring back memory names the weights."""
    tags = recv_req.tags
    return not tags or "weights" in tags
