"""The loader of the load format `mx-peer`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import mx
from mx import artifacts, config
from mx.core.variant import ProcessingKey
from mx.engines.compiling import CompileCaches
from mx.engines.replica.configuration import check_configuration
from mx.engines.replica.logs import logger_of
from mx.engines.replica.names import meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.run import LOADED, PROCESSED, GivenUpError, RankRun
from mx.engines.replica.tensors import slots_of
from mx.engines.vllm import processed
from mx.engines.vllm.compiled import configuration_of
from mx.engines.vllm.keys import engine_version, is_known, key_of
from mx.engines.vllm.progressive import EarlyProcessing
from mx.engines.vllm.worker import watch
from mx.errors import ConfigError

log = logger_of("vLLM")


def prepare_for_connector(vllm_config: Any) -> None:
    """Keep UCX whole if vLLM has a connector for KV caches, which may move GPU memory by NIXL with
    the UCX that a pull loads before."""
    if getattr(vllm_config, "kv_transfer_config", None) is not None:
        config.set_default("UCX_MODULES", "*")
        config.set_default("UCX_MEM_MMAP_HOOK_MODE", "bistro")


class MxPeerLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads a rank's weights from other replicas or from a peer that holds the checkpoint.

    Where neither is possible it is vLLM's ordinary loader. Afterwards it lends what was loaded.
    """

    def __init__(self, load_config: Any) -> None:
        """
        Args:
            load_config: vLLM's; its `model_loader_extra_config` has the options of `LoaderOptions`.

        Raises:
            ConfigError: An option is wrong.
        """
        # The ordinary loader knows neither the format nor the options.
        super().__init__(
            dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        )
        self.options = LoaderOptions.read(load_config.model_loader_extra_config)
        self._feed: mx.Pull | None = None
        self._run: RankRun | None = None
        self._device = torch.device("cpu")
        #: Until vLLM has processed the model.
        self._processing = contextlib.ExitStack()

    def download_model(self, model_config: Any) -> None:
        """Do nothing: what is needed is pulled when it is loaded."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model with its weights, and begin to lend them.

        Args:
            vllm_config: The engine's configuration.
            model_config: The model's; a draft model's is left to the ordinary loader.
            prefix: The prefix of the modules' names.

        Raises:
            MxError: Nothing can be pulled, and the ordinary loader is not to take over.
        """
        if model_config is not vllm_config.model_config or prefix:
            return super().load_model(vllm_config, model_config, prefix)
        try:
            with self._begin(vllm_config) as run:
                self._run = run
                self._begin_caches(run, vllm_config)
                # vLLM's kernels for CPUs repack linear weights, which no other process can read
                # then.
                plain = run.loading.plain = PROCESSED in run.keys and processed.on_cpu()
                model = None
                while model is None:  # what fails is not chosen again
                    if run.choice.state == PROCESSED:
                        model = self._load_processed(run, vllm_config, plain)
                    else:
                        model = self._load_and_process(run, vllm_config, plain)
                if run.lends == PROCESSED:
                    self._lend_processed(run, model)
                run.loaded(model)
        finally:
            self._run = None
        return model

    def _lend_processed(self, run: RankRun, model: Any) -> None:
        if why := _checked(processed.cannot_lend, model):
            log.warning("%s is not lent: %s", run.name, why)
        else:
            run.lend(slots_of(model, non_persistent=True), before_processing=False)

    def _begin(self, vllm_config: Any) -> RankRun:
        version = engine_version()
        if not is_known(version):
            log.warning(
                "mx was not tried with vLLM %s: processing keys are compared as always, and the "
                "ordinary loader takes over where something is missing",
                version,
            )
        parallel, model = vllm_config.parallel_config, vllm_config.model_config
        ranks = Ranks(
            parallel_state.get_tp_group(),
            parallel_state.get_pp_group(),
            (parallel.data_parallel_rank, parallel.data_parallel_size),
        )
        keys: dict[str, ProcessingKey] = {}
        for state in processed.states(self.options.state, vllm_config):
            try:
                keys[state] = key_of(vllm_config, ranks.places, state)
            except Exception as error:  # noqa: BLE001 - of a version that is not known
                log.warning("the %s state is neither taken nor lent: %s", state, error)
        if self.options.wake and not processed.on_cpu():
            why = processed.cannot_wake(vllm_config)
            if why or PROCESSED not in keys:
                raise ConfigError(
                    f"`wake` is not for this engine: {why or 'it takes no processed weights'}",
                    hint="leave out `wake`, and reload the weights after a sleep of level 2",
                )
        run = RankRun(
            "vLLM",
            meant_by(str(model.model), given=self.options.model, revision=model.revision),
            self.options,
            keys,
            ranks,
            Path(model.model),
        )
        if processed.on_cpu():
            run.loading.wake = ""  # there vLLM ignores sleep
        watch(run.loading, vllm_config)
        prepare_for_connector(vllm_config)
        return run

    def _begin_caches(self, run: RankRun, vllm_config: Any) -> None:
        """Take the compile caches that fit, before vLLM builds what it compiles. Never raises."""
        recording = config.recording() is not None
        if not (self.options.artifacts or recording):
            return
        try:
            if processed.on_cpu():
                # What vLLM 0.32 for CPUs packs ahead of time it can't load again, and it makes
                # Inductor's keys so that nothing is found by them.
                config.set_default("VLLM_USE_AOT_COMPILE", "0")
            fields = {"configuration": configuration_of(vllm_config)}
        except Exception as error:  # noqa: BLE001 - of a version that is not known
            log.warning("compile caches are neither taken nor recorded: %s", error)
            return
        if recording:
            artifacts.note(fields)
        else:
            run.loading.caches = CompileCaches("vLLM", log, run.name, self.options.settings, fields)

    def _load_and_process(self, run: RankRun, vllm_config: Any, plain: bool) -> Any:
        """Return the model as vLLM builds, fills and processes it, or None if any rank can't fill
        it with what was chosen."""
        given = vllm_config, vllm_config.model_config
        with processed.plain_linears(plain):
            if not run.choice.state:
                return super().load_model(*given)
            self._device = self._target(vllm_config)
            with (
                contextlib.suppress(GivenUpError),
                contextlib.ExitStack() as self._processing,
                processed.undone_unless_kept(vllm_config, self._device) as keep,
            ):
                model = super().load_model(*given)
                keep()
                return model
        return None

    def _load_processed(self, run: RankRun, vllm_config: Any, plain: bool) -> Any:
        """Return the model as another replica processed it, or None if any rank can't."""
        model, device = None, self._target(vllm_config)
        with processed.undone_unless_kept(vllm_config, device) as keep:
            try:
                made = run.new_tensors(device)
                with run.pull(hold=False, into=made) as pull:
                    model = processed.build(vllm_config, pull, made, device, plain)
                    for _ in run.compared((made or pull.state_dict()).items()):
                        pass
            except Exception as error:  # noqa: BLE001 - the ordinary loader is to take over
                run.error, model = error, None
            made = None  # of one that failed: another may need the memory
            if not run.agreed(model is not None):
                return None
            keep()
            return model

    def _target(self, vllm_config: Any) -> torch.device:
        chosen = self.load_config.device
        return torch.device(vllm_config.device_config.device if chosen is None else chosen)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill a model that vLLM has built, before it processes the weights.

        Args:
            model: The model.
            model_config: Its configuration.
        """
        run = self._run
        if run is None:
            super().load_weights(model, model_config)
            return
        both = run.lends == PROCESSED and LOADED in run.keys
        if both and _checked(processed.unsupported, model):
            run.lends = LOADED
        if run.choice.state == LOADED:
            run.load(lambda: self._fill(run, model))
        elif run.choice.state:
            run.load(lambda: self._feed_from(run.pull(hold=False), model, model_config))
        else:
            super().load_weights(model, model_config)
        run.lend_loaded(slots_of(model, non_persistent=False))

    def _fill(self, run: RankRun, model: Any) -> None:
        slots = slots_of(model, non_persistent=False)
        early = EarlyProcessing(slots, self._device)
        # What was taken from a snapshot is copied to be lent, once all of it is there.
        is_copied = run.lends == LOADED and run.choice.snapshot
        run.fill(slots, *([] if is_copied else [early.arrived]))
        self._processing.enter_context(early.once())

    def _feed_from(self, pull: mx.Pull, model: Any, model_config: Any) -> None:
        if (theirs := pull.files().get("config.json")) is not None:
            check_configuration(model_config.hf_config.to_dict(), theirs)
        if model_config.quantization is not None:
            pull.wait()  # some quantise while they load, and can't begin again
        self._feed = pull
        try:
            super().load_weights(model, model_config)
            pull.wait()
        finally:
            self._feed = None

    def get_all_weights(
        self, model_config: Any, model: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the checkpoint's tensors: layer by layer as they arrive, or from disk.

        Args:
            model_config: The model's configuration.
            model: The model.
        """
        if self._feed is None or self._run is None:
            yield from super().get_all_weights(model_config, model)
            return
        for layer in self._feed.layers():
            yield from self._run.compared(layer.tensors().items())


def _checked(check: Callable[[torch.nn.Module], str], model: torch.nn.Module) -> str:
    """Return what a check says, or why it can't be made."""
    try:
        return check(model)
    except Exception as error:  # noqa: BLE001 - of a version that is not known
        return str(error)
