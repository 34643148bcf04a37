"""Loads one rank of any engine: chooses weights, pulls them, falls back, and lends them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mx
from mx import config
from mx.core.packaging import INDEX_SUFFIX, TENSOR_SUFFIX
from mx.core.revisions import may_be_update
from mx.core.types import Manifest
from mx.core.variant import ProcessingKey
from mx.engines.compiling import CompileCaches
from mx.engines.replica import choice as choices
from mx.engines.replica import metrics
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.lender import Lender
from mx.engines.replica.logs import logger_of
from mx.engines.replica.names import EligibleModels
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.registries import clear_frames
from mx.engines.replica.tensors import (
    LiveTensors,
    ParameterSlot,
    cannot_move,
    check,
    common_device,
    copy_into,
    plain,
)
from mx.errors import ConfigError, IntegrityError, MxError, NotAllowedError
from mx.log import event
from mx.memory.tensors import torch_form
from mx.storage.folder_hash import remember_in_background
from mx.storage.own_weights import OwnWeights, Sample, stamps_in
from mx.text import listed


class Sampler:
    """Compares tensors with those of a folder, whose files are open. `close` it."""

    def __init__(self, own: OwnWeights) -> None:
        """
        Args:
            own: The folder's.
        """
        self._own = own
        self.compared = 0

    @classmethod
    def of(cls, path: Path | None) -> Sampler | None:
        """Return a sampler of a file or folder; None if it has no safetensors to compare with.

        Args:
            path: The path; None for no folder.

        Raises:
            ConfigError, CheckpointError, LocalError: As `OwnWeights`.
        """
        if path is None:
            return None
        files = path.iterdir() if path.is_dir() else [path]
        if not any(each.name.endswith((TENSOR_SUFFIX, INDEX_SUFFIX)) for each in files):
            return None
        return cls(OwnWeights(path))

    def close(self) -> None:
        """Close the files."""
        self._own.close()

    def passing(
        self, tensors: Iterable[tuple[str, torch.Tensor]], *, checkpoint: bool, processed: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors, each after a sample of it was compared.

        Args:
            tensors: What a peer serves, by name.
            checkpoint: Whether they are the checkpoint's own. Others, of which an engine has made
                its state, are compared only if name, dtype and shape are the checkpoint's.
            processed: Whether the engine may have put their elements in another order. Then only
                those of one dimension, and embeddings, are compared.

        Raises:
            IntegrityError: One differs.
            LocalError, CheckpointError: The folder's can't be read.
        """
        for name, tensor in tensors:
            sample = self._own.sample(name)
            if sample is not None:
                ordered = not processed or tensor.dim() < 2 or "embed" in name
                if checkpoint or (_same_kind(sample, tensor) and ordered):
                    self._compare(name, sample, tensor)
            yield name, tensor

    def _compare(self, name: str, sample: Sample, tensor: torch.Tensor) -> None:
        if not _same_kind(sample, tensor) or _bytes_at(tensor, sample) != sample.data:
            raise IntegrityError(
                f"{name} of the peer is not what {self._own.path} has",
                hint="the folder has other weights: name their own model, or remove them to take "
                "the peer's",
            )
        self.compared += 1


def _same_kind(sample: Sample, tensor: torch.Tensor) -> bool:
    return (tensor.dtype, tuple(tensor.shape)) == torch_form(sample.dtype, sample.shape)


def _bytes_at(tensor: torch.Tensor, sample: Sample) -> bytes:
    """Return the bytes of a tensor where the sample was taken."""
    if not sample.data:
        return b""
    width = tensor.element_size()
    first, last = sample.offset // width, (sample.offset + len(sample.data) - 1) // width + 1
    flat = plain(tensor).reshape(-1)[first:last].cpu().contiguous()
    data = bytes(flat.view(torch.uint8).numpy())
    begin = sample.offset - first * width
    return data[begin : begin + len(sample.data)]


#: A model's tensors after the engine has processed them, and before.
PROCESSED, LOADED = "processed", "loaded"
#: How often to ask for a source, in seconds.
_ASK_AGAIN_S = 0.5


class GivenUpError(Exception):
    """What was chosen could not be loaded: the engine's ordinary loader begins anew."""


class RankLoading:
    """What one rank of an engine has loaded and lends, for as long as the engine runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lender: Lender | None = None
        self.refused = 0
        #: How often it loaded from which state, or by the engine's ordinary loader.
        self.loads: Counter[str] = Counter()
        #: The identity of what was taken from peers, in hexadecimal; "" if nothing was.
        self.identity = ""
        #: Who served what was taken from peers: "tcp from HOST:PORT, ...".
        self.source = ""
        #: Whether the engine's updates are to keep linear weights as they are; see vLLM's loader.
        self.plain = False
        #: The compile caches from peers, if they were asked for.
        self.caches: CompileCaches | None = None
        #: Waits for the process that hashes the folder, if there is one.
        self.hashing: threading.Thread | None = None

    def status(self) -> dict[str, object]:
        """Return what `mx.engines.vllm.status` says that it returns."""
        lender = self.lender
        source = None if lender is None else lender.source
        return {
            "model": self.name,
            "variant": "" if lender is None else str(lender.key),
            "loads": dict(self.loads),
            "refused": self.refused,
            "lending": "off" if lender is None else lender.state,
            "revision": "" if source is None else source.model.revision,
            "identity": "" if source is None else source.identity_hex,
            "source": self.source,
            "why": "" if lender is None else lender.why,
            "compile_caches": "off" if self.caches is None else self.caches.state,
        }


class RankRun:
    """Loads the model of one rank."""

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
        #: Whether the ordinary loader takes over where nothing can be pulled. Where mx got the
        #: engine's files from a peer there is nothing on disk that it could load.
        self.falls_back = not meant.pin if options.fallback is None else options.fallback
        self.falls_back = self.falls_back and not options.files
        self.loading = RankLoading(self.name)
        #: Why this rank could not load what was chosen.
        self.error: Exception | None = None
        #: The state that this rank is going to lend, or "".
        self.lends = next(iter(keys), "") if options.lend else ""
        self._engine, self._files, self._log = engine, files, logger_of(engine)
        self._began_s = time.monotonic()
        self._pull: mx.Pull | None = None
        self._taken: Manifest | None = None
        self._sampler: Sampler | None = None
        self.choice = Choice.decode(ranks.from_first(self._choose().encode()))
        if not ranks.all_true(self._may_take(self.choice)):
            why = meant.refused or "the folders of the ranks have different weights"
            self.choice = Choice(why=why)
        self.name = self.choice.name or self.name
        self.loading.name = self.name
        self.loading.refused += self.choice.refused
        if not self.choice.state:
            self._take_over(self.choice.why)
        elif self.choice.refused:
            said = f"{self.choice.why}; its {self.choice.state} state is loaded"
            self._say_refused(self.name, said)

    def _say_refused(self, name: str, text: str) -> None:
        event(self._log, "engine.refused", level=logging.WARNING, model=name, text=text)

    def _may_take(self, chosen: Choice) -> bool:
        """Return True if this rank's folder, too, allows what the first rank has chosen."""
        if not chosen.state:
            return True
        return not self.meant.refused and chosen.identity == self.meant.identity

    def _choose(self) -> Choice:
        if not self.ranks.first:
            return Choice()
        meant = self.meant
        if meant.refused:
            return Choice(why=meant.refused)
        digits = self.pin[: choices.CHECKPOINT_DIGITS]
        pinned = Choice(CHECKPOINT, self.revision, digits, name=self.name)
        if self.pin and not self.keys:
            return pinned
        until_s = time.monotonic() + self.options.settings.wait_s
        while True:
            found = Choice()
            for name in meant.names:
                try:
                    found = self._look(name)
                except MxError as error:
                    found = pinned if self.pin else Choice(why=str(error))
                    if self.pin:
                        self._say_refused(name, f"{error}; its pinned {CHECKPOINT} is loaded")
                if found.state:
                    return replace(found, name=name, identity=meant.identity)
            if time.monotonic() >= until_s:
                return found
            time.sleep(_ASK_AGAIN_S)

    def _look(self, name: str) -> Choice:
        settings, identity = self.options.settings, self.meant.identity
        found = choices.look(
            name,
            self.keys,
            revision=self.revision,
            checkpoint=self.options.checkpoint,
            pin=self.pin,
            identity=identity,
            settings=settings,
        )
        if found.state or not identity:
            return found
        # It may be listed under another revision than the newest.
        for each in mx.list_models(settings=settings):
            known = each.ref.identity.hex() == identity and each.model.name == name
            if known and each.sources and each.model.variant == CHECKPOINT:
                digits = identity[: choices.CHECKPOINT_DIGITS]
                return replace(
                    found, state=CHECKPOINT, revision=each.model.revision, checkpoint=digits
                )
        return replace(found, why=found.why or f"no source has {identity[:16]}")

    def pull(self, *, hold: bool, device: str = "cpu", into: Any = None) -> mx.Pull:
        """Begin to pull what was chosen.

        Args:
            hold: Whether its memory is to be lent afterwards.
            device: Where to, "cuda:N" for a GPU's memory.
            into: The tensors to fill where they are, by name; None: new memory.
        """
        chosen = self.choice
        # What is attached on a GPU is the source's own, and an engine writes to its tensors.
        where: dict[str, Any] = {"device": device, "attach": device == "cpu"}
        if into is not None:
            where = {"into": into}
        model, variant, pin = self.name, CHECKPOINT, self.pin or chosen.identity
        if chosen.state == CHECKPOINT:
            model += f"@{pin}" if pin else ""
        else:
            variant = str(choices.with_checkpoint(self.keys[chosen.state], chosen.checkpoint))
            model += f"@{chosen.identities[variant]}"
        self._pull = mx.pull(
            model,
            revision=chosen.revision,
            variant=variant,
            hold=hold,
            **where,
            transport=self.options.transport or None,
            settings=self.options.settings,
        )
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

    def fill(self, slots: Mapping[str, ParameterSlot]) -> None:
        """Fill a model with the state before processing, each layer as it arrives.

        A model on a GPU is filled where it is, unless a copy of this state is to be lent: then that
        is pulled, and the engine's own tensors, which it is about to process, are copied from it.

        Args:
            slots: The model's.

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
        try:
            pull = self.pull(hold=lent, device=where)
        except NotAllowedError as refused:  # it may be allowed to pull what it may not serve
            if not lent:
                raise
            self.end()
            pull = self.pull(hold=False, device=where)
            self.lends = ""
            self._say_not_lent(refused)
        check(pull.wait_manifest(), slots)
        for layer in pull.layers():
            copy_into(slots, self.compared(layer.tensors().items()))
        pull.wait()

    def agreed(self, loaded: bool) -> bool:
        """Return True if every rank has loaded what was chosen. Otherwise every rank ends its pull,
        for the ordinary loader to take over.

        Args:
            loaded: Whether this rank has; `error` says why not.

        Raises:
            MxError: They have not, and the ordinary loader is not to take over.
        """
        if self.ranks.all_true(loaded):
            self.loading.loads[self.choice.state] += 1
            self._tell_taken()
            return True
        error, state = self.error, self.choice.state
        self.choice, self.error = Choice(name=self.name), None
        clear_frames(error)
        self.end()
        if error is not None and not self.falls_back:
            try:
                raise error
            finally:
                del error  # its traceback has this frame
        self._take_over(f"{state}: {error or 'another rank could not load it'}")
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

    def _take_over(self, why: str) -> None:
        if not self.falls_back:
            if self.options.files:
                hint = f"{self._engine} has its configuration from a peer, and no weights of it: "
                hint += f"serve the weights, too, or give {self._engine} a folder that has both"
            elif self.options.fallback is None:
                hint = 'a pin allows no other weights; "fallback": true has the ordinary loader'
                hint += " take over"
            else:
                hint = "`fallback` is off; with it the ordinary loader takes over"
            raise ConfigError(f"{self.name} can't be loaded from a peer: {why}", hint=hint)
        self.loading.loads["ordinary"] += 1
        event(
            self._log,
            "engine.fallback",
            level=logging.WARNING,
            model=self.name,
            rank=str(self.ranks),
            text=f"{why}; {self._engine}'s ordinary loader takes over",
        )

    def lend_loaded(self, slots: Mapping[str, ParameterSlot]) -> None:
        """Lend the state before processing, if that is what this rank lends. Never raises.

        Args:
            slots: The model's, before the engine processes its tensors.
        """
        if self.lends != LOADED:
            return
        with self._harmless():
            self._lend_loaded(slots)

    def _lend_loaded(self, slots: Mapping[str, ParameterSlot]) -> None:
        if bad := cannot_move(slots):
            self._log.warning(
                "%s is not lent: %s has no values before it is processed", self.name, bad
            )
            return
        if self._pull is not None and self.choice.state == LOADED:
            pull, self._pull = self._pull, None  # the lender's, from now on
            self.loading.lender = Lender.of_pull(
                pull, self._lent_as(), self.options, engine=self._engine
            )
        else:
            self.lend(slots, before_processing=True)

    def lend(self, slots: Mapping[str, ParameterSlot], *, before_processing: bool) -> None:
        """Begin to lend what is in memory. Never raises.

        Args:
            slots: The model's.
            before_processing: As for `Lender`.
        """
        with self._harmless():
            self.loading.lender = Lender(
                slots,
                self.name,
                self._lent_as(),
                self.options,
                engine=self._engine,
                revision=self._lent_revision(),
                files=self._files if self._files.is_dir() else None,
                before_processing=before_processing,
            )

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Log what fails inside the block: lending never stops its engine."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._say_not_lent(error)

    def _say_not_lent(self, error: Exception) -> None:
        why = str(error) or type(error).__name__
        why += "; the engine goes on, and lends nothing to other replicas"
        event(self._log, "engine.not_lent", level=logging.WARNING, model=self.name, text=why)

    def _lent_as(self) -> ProcessingKey:
        digits = self.choice.checkpoint
        if not self.choice.state and self.meant.identity and self._still_the_same():
            digits = self.meant.identity[: choices.CHECKPOINT_DIGITS]
        return choices.with_checkpoint(self.keys[self.lends], digits)

    def _lent_revision(self) -> str:
        """Return the revision to lend it as. An update stays one: its key is that of what it has
        replaced, and only the revision says that it is no longer made of that checkpoint."""
        taken = self.choice
        updated = taken.state not in ("", CHECKPOINT) and may_be_update(taken.revision)
        return taken.revision if updated else self.revision

    def _still_the_same(self) -> bool:
        """Return True if the folder that the ordinary loader has read is what it was before."""
        assert self.meant.folder is not None
        return stamps_in(self.meant.folder) == self.meant.stamps

    def loaded(self) -> None:
        """Say how the model was loaded; call it once that was processed.

        What the ordinary loader has read from a folder is hashed in the background, so that the
        next engine knows what it is.
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
