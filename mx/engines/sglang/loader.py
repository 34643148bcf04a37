"""SGLang's ordinary loader, fed by peers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang.srt.model_loader.loader import DefaultModelLoader

from mx.core.variant import shortened
from mx.engines.replica.configuration import check_configuration
from mx.engines.replica.keys import fields_of
from mx.engines.replica.loading import RankLoading
from mx.engines.replica.names import meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.registries import undone_unless_kept
from mx.engines.replica.run import LOADED, GivenUpError, RankRun
from mx.engines.replica.tensors import slots_of
from mx.errors import ConfigError

log = logging.getLogger(__name__)

#: Versions whose classes were tried; others are used with a warning.
KNOWN = ("0.5",)

_loadings: list[RankLoading] = []


class MxPeerLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads from other replicas or from a peer with the checkpoint, else as SGLang does.

    It takes and lends the state before SGLang processes the weights.
    """

    def __init__(self, load_config: Any, options: Mapping[str, object]) -> None:
        """
        Args:
            load_config: SGLang's, without mx's options.
            options: As for `LoaderOptions`.

        Raises:
            ConfigError: An option is wrong.
        """
        super().__init__(load_config)
        if not isinstance(options, Mapping):
            raise ConfigError(
                "`mx_peer` is not an object", hint='write {"mx_peer": {"model": "NAME"}}'
            )
        self.options = LoaderOptions.read(options)
        if self.options.state == "processed":
            raise ConfigError(
                "SGLang takes no weights that another replica has processed",
                hint='leave out `state`, or write "loaded"',
            )
        if self.options.artifacts:
            raise ConfigError(
                "SGLang takes no compile caches: nothing is known of how it lays them out",
                hint="leave out `artifacts`",
            )
        if self.options.wake:
            raise ConfigError(
                "SGLang keeps more beside the weights than peers lend",
                hint="leave out `wake`, and update the weights after `resume_memory_occupation`",
            )
        self._run: RankRun | None = None
        self._configuration: Mapping[str, Any] = {}

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Return the model with its weights, and lend them.

        Args:
            model_config: The model's configuration.
            device_config: Where the engine computes.

        Raises:
            MxError: Nothing can be pulled, and the ordinary loader is not to take over.
        """
        self._configuration = model_config.hf_config.to_dict()
        given = {"model_config": model_config, "device_config": device_config}
        try:
            with self._begin(model_config) as run:
                self._run, model = run, None
                while run.choice.state and model is None:  # what fails is not chosen again
                    with contextlib.suppress(GivenUpError), undone_unless_kept("sglang") as keep:
                        model = super().load_model(**given)
                        keep()
                if model is None:
                    model = super().load_model(**given)
                run.loaded(model)
        finally:
            self._run = None
        return model

    def _begin(self, model_config: Any) -> RankRun:
        import sglang
        from sglang.srt.distributed import parallel_state

        version = str(sglang.__version__)
        if ".".join(version.split(".")[:2]) not in KNOWN:
            log.warning("mx was not tried with SGLang %s", version)
        ranks = Ranks(parallel_state.get_tp_group(), parallel_state.get_pp_group(), (0, 1))
        keys = {}
        for state in [] if self.options.state == "checkpoint" else [LOADED]:
            try:
                fields = fields_of("sglang", version, model_config, ranks.places, state)
                keys[state] = shortened(fields)
            except Exception as error:  # noqa: BLE001 - of a version that is not known
                log.warning("the %s state is neither taken nor lent: %s", state, error)
        run = RankRun(
            "SGLang",
            meant_by(
                str(model_config.model_path),
                given=self.options.model,
                revision=model_config.revision,
            ),
            self.options,
            keys,
            ranks,
            Path(model_config.model_path),
        )
        _loadings.append(run.loading)
        return run

    def load_weights_and_postprocess(
        self, model: Any, weights: Iterator[tuple[str, torch.Tensor]], target_device: torch.device
    ) -> None:
        """Fill a model that SGLang has built, lend it, and have SGLang process it.

        Args:
            model: The model.
            weights: The checkpoint's on disk, which are read only if nothing can be pulled.
            target_device: Where the engine computes.
        """
        run = self._run
        assert run is not None
        if run.choice.state:
            run.load(lambda: self._fill(run, model, target_device))
        else:
            DefaultModelLoader.load_weights_only(model, weights, target_device)
        run.lend_loaded(slots_of(model, non_persistent=False))
        DefaultModelLoader.postprocess_weights(model, target_device)

    def _fill(self, run: RankRun, model: Any, target_device: torch.device) -> None:
        if run.choice.state == LOADED:
            run.fill(slots_of(model, non_persistent=False))
            return
        pull = run.pull(hold=False)
        if (theirs := pull.files().get("config.json")) is not None:
            check_configuration(self._configuration, theirs)
        arriving = (item for layer in pull.layers() for item in layer.tensors().items())
        DefaultModelLoader.load_weights_only(model, run.compared(arriving), target_device)
        pull.wait()


def status() -> list[dict[str, object]]:
    """Return what this process loaded and lends, each model as `mx.engines.vllm.status` does."""
    return [loading.status() for loading in _loadings]


def withdraw(reason: str) -> None:
    """Stop serving what this process lends.

    Args:
        reason: A word.
    """
    for loading in _loadings:
        if loading.lender is not None:
            loading.lender.withdraw(reason)


def restore(reason: str) -> None:
    """Serve again what was withdrawn, if it is as it was.

    Args:
        reason: The word that `withdraw` had.
    """
    for loading in _loadings:
        if loading.lender is not None:
            loading.lender.restore(reason)
