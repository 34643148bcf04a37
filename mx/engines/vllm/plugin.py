"""The plugin: vLLM calls `register` in each of its processes, maybe more than once."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

LOAD_FORMAT = "mx-peer"
#: Of vLLM's weight transfer, which follows a trainer.
BACKEND = "mx"


def register() -> None:
    """Add the load format `mx-peer` to vLLM. Idempotent. Nothing of mx runs afterwards."""
    try:
        from vllm.model_executor import model_loader

        if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            return
        _register_weight_transfer()
        from mx.engines.replica import metrics
        from mx.engines.vllm.compiled import forget_places
        from mx.engines.vllm.files import fetch_before_configuration
        from mx.engines.vllm.loader import MxPeerLoader

        model_loader.register_model_loader(LOAD_FORMAT)(MxPeerLoader)
        fetch_before_configuration()
        forget_places()
        metrics.register()
    except Exception as error:  # noqa: BLE001 - the engine must start
        log.warning(
            "this version of vLLM has no place for mx: load format %s is missing (%s)",
            LOAD_FORMAT,
            error,
        )


def _register_weight_transfer() -> None:
    """Add the weight transfer backend `mx` to vLLM, for workers and for trainers. Idempotent."""
    from vllm.distributed.weight_transfer.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    for factory, module, name in (
        (WeightTransferEngineFactory, "weight_transfer", "MxWeightTransferEngine"),
        (WeightTransferTrainerFactory, "trainer", "MxTrainerWeightTransferEngine"),
    ):
        if BACKEND not in factory._registry:
            factory.register_engine(BACKEND, f"mx.engines.vllm.{module}", name)
