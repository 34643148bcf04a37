"""Loads one rank of any engine: pulls what was chosen, falls back, and lends what was loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mx
from mx import config
from mx.api.arguments import PlanArguments
from mx.core.types import Manifest
from mx.core.variant import ProcessingKey
from mx.engines.replica import choice as choices
from mx.engines.replica import metrics
from mx.engines.replica.attempts import Attempts
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.folder_hash import remember_in_background
from mx.engines.replica.frozen import reader
from mx.engines.replica.lender import Lender
from mx.engines.replica.loading import RankLoading
from mx.engines.replica.logs import logger_of
from mx.engines.replica.names import EligibleModels
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.registries import clear_frames
from mx.engines.replica.sampler import Sampler
from mx.engines.replica.tensors import (
    LiveTensors,
    ParameterSlot,
    cannot_move,
    check,
    common_device,
    copy_into,
    device_of,
    made_for,
)
from mx.errors import ConfigError, NotAllowedError
from mx.log import event
from mx.storage.own_weights import stamps_in
from mx.text import listed

#: A model's tensors after the engine has processed them, and before.
PROCESSED, LOADED = "processed", "loaded"


class GivenUpError(Exception):
    """What was chosen could not be loaded by all ranks: the engine begins anew with `choice`."""


class RankRun:
    """Loads the model of one rank, inside a `with` block: what that leaves by an error lends
    nothing."""

    def __init__(
        self,
        engine: str,
        meant: EligibleModels,
        options: LoaderOptions,
        keys: Mapping[str, ProcessingKey],
        ranks: Ranks,
        files: Path,
    ) -> None:
        """Choose what to load, together with the other ranks.

        Args:
            engine: What messages call the engine. In lower case it names the engine's own logger,
                which says what is taken, and why something is not.
            meant: What may be taken.
            options: Of the loader.
            keys: The states that this rank can take, best first, each with its key.
            ranks: All ranks of the engine.
            files: The folder with the engine's configuration of the model, to travel along.

        Raises:
            ConfigError: There is nothing to pull, and the ordinary loader is not to take over.
        """
        self.options, self.keys, self.ranks, self.meant = options, keys, ranks, meant
        self.name, self.revision, self.pin = meant.name, meant.revision, meant.pin
        self.loading = RankLoading(self.name, options.wake)
        #: Why this rank could not load what was chosen.
        self.error: Exception | None = None
        #: The state that this rank is going to lend, or "".
        self.lends = next(iter(keys), "") if options.lend else ""
        self._engine, self._files, self._log = engine, files, logger_of(engine)
        self._began_s = time.monotonic()
        self._pull: mx.Pull | None = None
        self._taken: Manifest | None = None
        self._sampler: Sampler | None = None
        self._attempts = Attempts(engine, meant, options, keys, ranks)
        self._choose(self._attempts.first())
        self.loading.refused = int(self.choice.refused)

    def _choose(self, chosen: Choice) -> None:
        #: What this rank loads, as all others do; without a state the ordinary loader does.
        self.choice = chosen
        self.name = self.loading.name = chosen.name or self.name
        if not chosen.state:
            self.loading.loads["ordinary"] += 1

    def __enter__(self) -> RankRun:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self.loading.lender is not None:  # of what could not be processed
            self.loading.lender.close()
        self.end()

    def new_tensors(self, device: torch.device) -> dict[str, torch.Tensor] | None:
        """Return tensors for `pull` to fill with what was chosen, which torch allocates on the
        caller's thread: in the engine's own memory pool, if that thread uses one.

        Args:
            device: Where the engine computes.

        Returns:
            The tensors by name; None where a pull makes them itself, in host memory.
        """
        if device_of(device) == "cpu":
            return None
        model, which = self._chosen()
        if folder := self.choice.snapshot:
            return made_for(reader("layout_of")(Path(folder), which["variant"]), device)
        return made_for(choices.manifest_of(model, which).layout, device)

    def _chosen(self) -> tuple[str, PlanArguments]:
        """Return what was chosen as the arguments of a pull."""
        chosen = self.choice
        model, variant, pin = self.name, CHECKPOINT, self.pin or chosen.identity
        if chosen.state == CHECKPOINT:
            model += f"@{pin}" if pin else ""
        else:
            variant = str(choices.with_checkpoint(self.keys[chosen.state], chosen.checkpoint))
            model += f"@{chosen.identities[variant]}"
        which: PlanArguments = {
            "revision": chosen.revision,
            "variant": variant,
            "transport": self.options.transport or None,
            "settings": self.options.settings,
        }
        return model, which

    def pull(self, *, hold: bool, device: str = "cpu", into: Any = None) -> mx.Pull:
        """Begin to pull what was chosen.

        Args:
            hold: Whether its memory is to be lent afterwards.
            device: Where to, "cuda:N" for a GPU's memory.
            into: The tensors to fill where they are, by name; None: new memory.
        """
        # What is attached on a GPU is the source's own, and an engine writes to its tensors.
        where: dict[str, Any] = {"device": device, "attach": device == "cpu"}
        if into is not None:
            where = {"into": into}
        model, which = self._chosen()
        if self.choice.snapshot:
            where |= {"source": "snapshot", "path": self.choice.snapshot}
        self._pull = mx.pull(model, **which, hold=hold, **where)
        self._taken = self._pull.wait_manifest()
        self._check_files(self._taken)
        return self._pull

    def _check_files(self, taken: Manifest) -> None:
        """Raise ConfigError unless the files that mx got for the engine came with these weights."""
        files, ref = self.options.files, taken.ref
        if not files or ref.packaging.hex() == files:
            return
        # A replica of the checkpoint whose files they are has no files of the checkpoint's own.
        made_of = self.options.checkpoint
        digits = made_of[: choices.CHECKPOINT_DIGITS]
        if self.choice.state != CHECKPOINT and digits and self.choice.checkpoint == digits:
            return
        raise ConfigError(
            f"the configuration of {self.name} came from another source than its weights",
            hint="serve both together, or give the engine a folder with the files",
        )

    def compared(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is pulled, each tensor after a few bytes of it were compared with those in the
        engine's folder, where that has weights.

        Args:
            tensors: By name.

        Raises:
            IntegrityError: One differs.
        """
        if self._sampler is None:
            self._sampler = Sampler.of(self.meant.folder)
        if self._sampler is None:
            yield from tensors
            return
        state = self.choice.state
        yield from self._sampler.passing(
            tensors, checkpoint=state == CHECKPOINT, processed=state == PROCESSED
        )

    def fill(
        self,
        slots: Mapping[str, ParameterSlot],
        arrived: Callable[[Iterable[str]], None] = lambda names: None,
    ) -> None:
        """Fill a model with the state before processing, each layer as it arrives.

        A model on a GPU is filled where it is, unless a copy of this state is to be lent: then that
        is pulled, and the engine's own tensors, which it is about to process, are copied from it.

        Args:
            slots: The model's.
            arrived: Called with the names of the tensors of each layer, once the model has them,
                if it has copies: what is filled in place is the pull's until that ends.

        Raises:
            ConfigError: It does not fit the model, in which nothing was changed.
            MxError: The error that ended the pull.
        """
        held = ((name, slot.get()) for name, slot in slots.items())
        device = common_device({name: tensor for name, tensor in held if tensor is not None})
        on_gpu, lent = device.startswith("cuda"), self.lends == LOADED
        if on_gpu and not (lent and self.options.copy):
            pull = self.pull(hold=False, into=LiveTensors(slots))
            for layer in pull.layers():
                for _ in self.compared(layer.tensors().items()):
                    pass
            pull.wait()
            pull.release()  # they are the engine's alone, which processes them
            self.end()
            return
        where = device if on_gpu and self.options.copy == "device" else "cpu"
        holds = lent and not self.choice.snapshot  # which is lent under its name, as by its owner
        try:
            pull = self.pull(hold=holds, device=where)
        except NotAllowedError as refused:  # it may be allowed to pull what it may not serve
            if not holds:
                raise
            self.end()
            pull = self.pull(hold=False, device=where)
            self.lends = ""
            self._say_not_lent(refused)
        check(pull.wait_manifest(), slots)
        for layer in pull.layers():
            tensors = layer.tensors()
            copy_into(slots, self.compared(tensors.items()))
            arrived(tensors)
        pull.wait()

    def load(self, how: Callable[[], object]) -> None:
        """Load what was chosen.

        Args:
            how: Fills the model.

        Raises:
            GivenUpError: This rank or another could not; `choice` is what to load instead.
            MxError: As `agreed`.
        """
        loaded = False
        try:
            how()
            loaded = True
        except Exception as error:  # noqa: BLE001 - what is next in the order is to take over
            self.error = error
        if not self.agreed(loaded):
            raise GivenUpError

    def agreed(self, loaded: bool) -> bool:
        """Return True if every rank has loaded what was chosen. Otherwise every rank ends its pull,
        and `choice` is the next best, or none for the ordinary loader to take over.

        Args:
            loaded: Whether this rank has; `error` says why not.

        Raises:
            MxError: They have not, nothing else is listed, and the ordinary loader is not to take
                over.
        """
        if self.ranks.all_true(loaded):
            self.loading.loads[self.choice.state] += 1
            self._tell_taken()
            return True
        error, self.error = self.error, None
        clear_frames(error)
        self.end()
        try:
            self._choose(self._attempts.after(self.choice, error))
        finally:
            del error  # its traceback has this frame
        return False

    def _tell_taken(self) -> None:
        """Say in the engine's log which weights were taken."""
        assert self._taken is not None
        self._note_source()
        identity = self.loading.identity = self._taken.ref.identity.hex()
        if self.choice.state == CHECKPOINT:
            digits = identity[: choices.CHECKPOINT_DIGITS]
            self.choice = replace(self.choice, checkpoint=digits)
        event(
            self._log,
            "engine.taken",
            model=self.name,
            revision=self.choice.revision,
            state=self.choice.state,
            pin=self._taken.ref.pin.hex(),
            rank=str(self.ranks),
            why=self.meant.how,
        )

    def _note_source(self) -> None:
        report = None if self._pull is None else self._pull.report
        if report is not None:
            ways = dict.fromkeys(f"{path.transport} from {path.source}" for path in report.paths)
            self.loading.source = listed([*ways])

    def lend_loaded(self, slots: Mapping[str, ParameterSlot]) -> None:
        """Lend the state before processing, if that is what this rank lends. Never raises.

        Args:
            slots: The model's, before the engine processes its tensors.
        """
        if self.lends != LOADED:
            return
        if bad := cannot_move(slots):
            self._log.warning(
                "%s is not lent: %s has no values before it is processed", self.name, bad
            )
        else:
            self.lend(slots, before_processing=True)

    def lend(self, slots: Mapping[str, ParameterSlot], *, before_processing: bool) -> None:
        """Begin to lend what is in memory. Never raises.

        Args:
            slots: The model's.
            before_processing: As for `Lender`.
        """
        from_peer = self.choice.state == LOADED and not self.choice.snapshot
        pull = self._pull if before_processing and from_peer else None
        try:
            self.loading.lender = Lender(
                slots,
                self.name,
                self._lent_as(),
                self.options,
                engine=self._engine,
                revision=self.choice.revision_to_lend(self.revision),
                files=self._files if self._files.is_dir() else None,
                before_processing=before_processing,
                pull=pull,
            )
            if pull is not None:
                self._pull = None  # the lender's, from now on
        except Exception as error:  # noqa: BLE001 - lending never stops its engine
            self._say_not_lent(error)

    def _say_not_lent(self, error: Exception) -> None:
        why = str(error) or type(error).__name__
        why += "; the engine goes on, and lends nothing to other replicas"
        event(self._log, "engine.not_lent", level=logging.WARNING, model=self.name, text=why)

    def _lent_as(self) -> ProcessingKey:
        digits, meant = self.choice.checkpoint, self.meant
        if not self.choice.state and meant.identity:
            assert meant.folder is not None
            if stamps_in(meant.folder) == meant.stamps:  # it is what it was before
                digits = meant.identity[: choices.CHECKPOINT_DIGITS]
        return choices.with_checkpoint(self.keys[self.lends], digits)

    def loaded(self, model: torch.nn.Module) -> None:
        """Say how the model was loaded, and watch it; call it once that was processed.

        What the ordinary loader has read from a folder is hashed in the background, so that the
        next engine knows what it is.

        Args:
            model: The model, as the engine computes with it.
        """
        taken = bool(self.choice.state)
        labels: dict[str, Any] = {
            "model": self.name,
            "revision": self.choice.revision if taken else "",
            "rank": str(self.ranks),
            "state": self.choice.state or "ordinary",
            "identity": self.loading.identity if taken else "",
            "source": self.loading.source if taken else "",
        }
        seconds = round(time.monotonic() - self._began_s, 3)
        event(self._log, "engine.loaded", **labels, seconds=seconds)
        metrics.show(labels, seconds)
        if self.loading.lender is not None:
            self.loading.lender.processed()
            self.loading.lender.watch(model)
        folder = self.meant.folder
        if folder is not None and not self.choice.state and self.ranks.first:
            self.loading.hashing = remember_in_background(folder, config.state_folder())

    def end(self) -> None:
        """Close the pull, unless a lender has taken it over. Tensors keep its memory."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        if self._pull is not None:
            self._note_source()
            self._pull.close()
            self._pull = None
