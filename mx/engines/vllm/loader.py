"""The loader of the load format `mx-peer`."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import mx
from mx import artifacts, config
from mx.core.variant import ProcessingKey, shortened
from mx.engines.compiling import CompileCaches
from mx.engines.replica.configuration import check_configuration
from mx.engines.replica.keys import fields_of, short
from mx.engines.replica.logs import logger_of
from mx.engines.replica.names import meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.run import LOADED, PROCESSED, GivenUpError, RankRun
from mx.engines.replica.tensors import device_of, slots_of
from mx.engines.vllm import processed
from mx.engines.vllm.compiled import configuration_of
from mx.engines.vllm.worker import watch

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
        run = self._run = self._begin(vllm_config)
        self._begin_caches(run, vllm_config)
        # vLLM's kernels for CPUs repack linear weights, which no other process can read then.
        plain = run.loading.plain = PROCESSED in run.keys and processed.on_cpu()
        try:
            model = None
            if run.choice.state == PROCESSED:
                model = self._load_processed(run, vllm_config, plain)
            if model is None:
                model = self._load_and_process(run, vllm_config, plain)
            if run.lends == PROCESSED:
                self._lend_processed(run, model)
            run.loaded()
            if run.loading.lender is not None:
                run.loading.lender.watch(model)
        finally:
            self._run = None
            run.end()
        return model

    def _lend_processed(self, run: RankRun, model: Any) -> None:
        try:
            why = processed.cannot_lend(model)
        except Exception as error:  # noqa: BLE001 - of a version that is not known
            why = str(error)
        if why:
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
        run = RankRun(
            "vLLM",
            meant_by(str(model.model), given=self.options.model, revision=model.revision),
            self.options,
            keys,
            ranks,
            Path(model.model),
        )
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
        """Return the model as vLLM builds, fills and processes it; built anew if what was chosen
        could not be loaded."""
        given = vllm_config, vllm_config.model_config
        with processed.plain_linears(plain):
            if run.choice.state:
                with (
                    contextlib.suppress(GivenUpError),
                    processed.undone_unless_kept(vllm_config, self._target(vllm_config)) as keep,
                ):
                    model = super().load_model(*given)
                    keep()
                    return model
            return super().load_model(*given)

    def _load_processed(self, run: RankRun, vllm_config: Any, plain: bool) -> Any:
        """Return the model as another replica processed it, or None if any rank can't."""
        model, device = None, self._target(vllm_config)
        with processed.undone_unless_kept(vllm_config, device) as keep:
            try:
                with run.pull(hold=False, device=device_of(device)) as pull:
                    model = processed.build(vllm_config, pull, device, plain)
                    for _ in run.compared(pull.state_dict().items()):
                        pass
            except Exception as error:  # noqa: BLE001 - the ordinary loader is to take over
                run.error, model = error, None
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
        if run.lends == PROCESSED and LOADED in run.keys:
            try:
                why = processed.unsupported(model)
            except Exception as error:  # noqa: BLE001 - of a version that is not known
                why = str(error)
            if why:
                run.lends = LOADED
        if run.choice.state:
            loaded = False
            try:
                if run.choice.state == LOADED:
                    run.fill(slots_of(model, non_persistent=False))
                else:
                    self._feed_from(run.pull(hold=False), model, model_config)
                loaded = True
            except Exception as error:  # noqa: BLE001 - the ordinary loader is to take over
                run.error = error
            if not run.agreed(loaded):
                raise GivenUpError
        else:
            super().load_weights(model, model_config)
        run.lend_loaded(slots_of(model, non_persistent=False))

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


# -- the processing keys of what a rank of vLLM holds ----------------------------------------------

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
