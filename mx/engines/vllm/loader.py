"""The loader of the load format `mx-peer`."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import mx
from mx.engines.replica import choice as choices
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.lender import Lender
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.tensors import cannot_move, check, copy_into, slots_of
from mx.engines.vllm import processed
from mx.engines.vllm.key import LOADED, PROCESSED, engine_version, is_known, key_of
from mx.engines.vllm.names import mx_name
from mx.engines.vllm.ranks import Ranks
from mx.engines.vllm.worker import Loading, watch
from mx.errors import ConfigError, MxError
from mx.log import event

log = logging.getLogger(__name__)


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
        self._run: _Run | None = None

    def download_model(self, model_config: Any) -> None:
        """Do nothing: what is needed is pulled when it is loaded."""

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model with its weights, and begin to lend them.

        Args:
            vllm_config: The engine's configuration.
            model_config: The model's; a draft model's is left to the ordinary loader.
            prefix: Of the modules' names.

        Raises:
            MxError: Nothing can be pulled, and the option `fallback` is off.
        """
        if model_config is not vllm_config.model_config or prefix:
            return super().load_model(vllm_config, model_config, prefix)
        run = self._run = _Run(self.options, vllm_config)
        try:
            model = None
            if run.choice.state == PROCESSED:
                model = self._load_processed(run)
            if model is None:
                with processed.plain_linears(run.plain):
                    model = super().load_model(vllm_config, model_config, prefix)
            run.lend(model)
        finally:
            self._run = None
            run.end()
        return model

    def _load_processed(self, run: _Run) -> Any:
        """Return the model as another replica processed it, or None if any rank can't."""
        model = None
        with processed.undone_unless_kept(run.vllm_config) as keep:
            try:
                with run.pull(hold=False) as pull:
                    model = processed.build(run.vllm_config, pull, self._target(run), run.plain)
            except Exception as error:  # noqa: BLE001 - the ordinary loader is to take over
                run.error, model = error, None
            if run.ranks.all_true(model is not None):
                keep()
                run.loading.count(PROCESSED)
                return model
        run.give_up()
        return None

    def _target(self, run: _Run) -> torch.device:
        chosen = self.load_config.device
        return torch.device(run.vllm_config.device_config.device if chosen is None else chosen)

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
        run.decide(model)
        if run.choice.state:
            loaded = False
            try:
                self._pull_into(run, model, model_config)
                loaded = True
            except Exception as error:  # noqa: BLE001 - the ordinary loader is to take over
                run.error = error
            if run.ranks.all_true(loaded):
                run.loading.count(run.choice.state)
            else:
                run.give_up()
        if not run.choice.state:
            run.loading.count("ordinary")
            super().load_weights(model, model_config)
        run.loaded(model)

    def _pull_into(self, run: _Run, model: Any, model_config: Any) -> None:
        if run.choice.state == LOADED:
            slots = slots_of(model, non_persistent=False)
            pull = run.pull(hold=run.lends == LOADED)
            check(pull.wait_manifest(), slots)
            for layer in pull.layers():
                copy_into(slots, layer.tensors().items())
            pull.wait()
            return
        pull = run.pull(hold=False)
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
        if self._feed is None:
            yield from super().get_all_weights(model_config, model)
            return
        for layer in self._feed.layers():
            yield from layer.tensors().items()


class _Run:
    """One rank's way through loading."""

    def __init__(self, options: LoaderOptions, vllm_config: Any) -> None:
        self.options, self.vllm_config = options, vllm_config
        self.began_s = time.monotonic()
        self.ranks = Ranks(vllm_config)
        self.name, self.revision, self.pin = choices.name_and_revision(
            options.model or mx_name(vllm_config.model_config)
        )
        self.loading = Loading(self.name, vllm_config)
        watch(self.loading)
        if not is_known(engine_version()):
            log.warning(
                "mx was not tried with vLLM %s: its processing keys are compared as always, and "
                "the ordinary loader takes over where something is missing",
                engine_version(),
            )
        self.keys = {
            state: key_of(vllm_config, self.ranks.places, state)
            for state in processed.states(options.state, vllm_config)
        }
        #: True if linear layers are to keep their weights, which vLLM's kernels for CPUs repack.
        self.plain = PROCESSED in self.keys and processed.on_cpu()
        self.choice = Choice.decode(self.ranks.from_first(self._choose().encode()))
        self._pull: mx.Pull | None = None
        #: Why this rank could not load what was chosen.
        self.error: Exception | None = None
        #: The state that this rank is going to lend, or "".
        self.lends = next(iter(self.keys), "") if options.lend else ""
        self.loading.refused += self.choice.refused
        if not self.choice.state:
            self._take_over(self.choice.why)
        elif self.choice.refused:
            text = f"{self.choice.why}; its {self.choice.state} state is loaded"
            event(log, "engine.refused", level=logging.WARNING, model=self.name, text=text)

    def _choose(self) -> Choice:
        if not self.ranks.first:
            return Choice()
        if self.pin:  # it proves the checkpoint's weights, and no others
            return Choice(CHECKPOINT, self.revision, self.pin[: choices.CHECKPOINT_DIGITS])
        until_s = time.monotonic() + self.options.settings.wait_s
        while True:
            try:
                found = choices.look(
                    self.name,
                    self.keys,
                    revision=self.revision,
                    checkpoint=self.options.checkpoint,
                    settings=self.options.settings,
                )
            except MxError as error:
                found = Choice(why=str(error))
            if found.state or time.monotonic() >= until_s:
                return found
            time.sleep(0.5)

    def pull(self, *, hold: bool) -> mx.Pull:
        """Begin to pull what was chosen."""
        chosen = self.choice
        model, variant = self.name, CHECKPOINT
        if chosen.state == CHECKPOINT:
            model += f"@{self.pin}" if self.pin else ""
        else:
            variant = str(choices.with_checkpoint(self.keys[chosen.state], chosen.checkpoint))
        self._pull = mx.pull(
            model,
            revision=chosen.revision,
            variant=variant,
            hold=hold,
            transport=self.options.transport or None,
            settings=self.options.settings,
        )
        return self._pull

    def give_up(self) -> None:
        """Leave this rank, like all others, to the ordinary loader, after one of them failed.

        Raises:
            MxError: The option `fallback` is off.
        """
        self.end()
        error, state = self.error, self.choice.state
        self.choice = Choice()
        if error is not None and not self.options.fallback:
            raise error
        self._take_over(f"{state}: {error or 'another rank could not load it'}")

    def _take_over(self, why: str) -> None:
        if not self.options.fallback:
            raise ConfigError(
                f"{self.name} can't be loaded from a peer: {why}",
                hint="`fallback` is off; with it the ordinary loader takes over",
            )
        event(log, "engine.fallback", level=logging.WARNING, model=self.name,
              rank=str(self.ranks), text=f"{why}; vLLM's ordinary loader takes over")  # fmt: skip

    def decide(self, model: Any) -> None:
        """Lend another state if vLLM can't take over the processed one of such a model."""
        if self.lends == PROCESSED and LOADED in self.keys and processed.unsupported(model):
            self.lends = LOADED

    def loaded(self, model: Any) -> None:
        """Lend the state before processing, if that is what this rank lends."""
        if self.lends != LOADED:
            return
        slots = slots_of(model, non_persistent=False)
        if bad := cannot_move(slots):
            log.warning("%s is not lent: %s has no values before vLLM processes it", self.name, bad)
            return
        key = choices.with_checkpoint(self.keys[LOADED], self.choice.checkpoint)
        if self._pull is not None and self.choice.state == LOADED:
            self.loading.lender = Lender.of_pull(self._pull, key, self.options)
            self._pull = None  # the lender's, from now on
        else:
            self.loading.lender = self._lend(slots, key, before_processing=True)

    def lend(self, model: Any) -> None:
        """Lend the processed state, if that is what this rank lends, and say what was done."""
        if self.lends == PROCESSED:
            if why := processed.cannot_lend(model):
                log.warning("%s is not lent: %s", self.name, why)
            else:
                key = choices.with_checkpoint(self.keys[PROCESSED], self.choice.checkpoint)
                slots = slots_of(model, non_persistent=True)
                self.loading.lender = self._lend(slots, key, before_processing=False)
        event(log, "engine.loaded", model=self.name, rank=str(self.ranks),
              state=self.choice.state or "ordinary",
              seconds=round(time.monotonic() - self.began_s, 3))  # fmt: skip

    def _lend(self, slots: Any, key: mx.ProcessingKey, *, before_processing: bool) -> Lender:
        folder = Path(self.vllm_config.model_config.model)
        return Lender(
            slots,
            self.name,
            key,
            self.options,
            revision=self.revision,
            files=folder if folder.is_dir() else None,
            before_processing=before_processing,
        )

    def end(self) -> None:
        """Close the pull, if it is not held. Tensors keep its memory."""
        if self._pull is not None:
            self._pull.close()
            self._pull = None
