"""One rank's way through loading, whatever the engine: choose, pull, give up, lend."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import mx
from mx.core.variant import ProcessingKey
from mx.engines.replica import choice as choices
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.lender import Lender
from mx.engines.replica.logs import logger_of
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.tensors import Slot, cannot_move, check, copy_into
from mx.errors import ConfigError, MxError
from mx.log import event

#: A model's tensors after the engine has processed them, and before.
PROCESSED, LOADED = "processed", "loaded"
#: How often to ask for a source, in seconds.
_ASK_AGAIN_S = 0.5


class Loading:
    """What one rank of an engine loaded, and lends; it stays for as long as the engine does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lender: Lender | None = None
        self.refused = 0
        #: How often it loaded from which state, or by the engine's ordinary loader.
        self.loads: Counter[str] = Counter()


class Run:
    """One rank's way through loading."""

    def __init__(
        self,
        engine: str,
        name: str,
        options: LoaderOptions,
        keys: Mapping[str, ProcessingKey],
        ranks: Ranks,
        files: Path,
    ) -> None:
        """Choose what to load, together with the other ranks.

        Args:
            engine: What messages call the engine.
            name: The model: NAME, NAME:REVISION or NAME@PIN.
            options: Of the loader.
            keys: The states that this rank can take, best first, each with its key.
            ranks: All ranks of the engine.
            files: The folder with the engine's configuration of the model, to travel along.

        Raises:
            ConfigError: There is nothing to pull, and the option `fallback` is off.
        """
        self.options, self.keys, self.ranks = options, keys, ranks
        self.name, self.revision, self.pin = choices.name_and_revision(name)
        self.loading = Loading(self.name)
        #: Why this rank could not load what was chosen.
        self.error: Exception | None = None
        #: The state that this rank is going to lend, or "".
        self.lends = next(iter(keys), "") if options.lend else ""
        self._engine, self._files, self._log = engine, files, logger_of(engine)
        self._began_s = time.monotonic()
        self._pull: mx.Pull | None = None
        self.choice = Choice.decode(ranks.from_first(self._choose().encode()))
        self.loading.refused += self.choice.refused
        if not self.choice.state:
            self._take_over(self.choice.why)
        elif self.choice.refused:
            text = f"{self.choice.why}; its {self.choice.state} state is loaded"
            event(self._log, "engine.refused", level=logging.WARNING, model=self.name, text=text)

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
            time.sleep(_ASK_AGAIN_S)

    def pull(self, *, hold: bool) -> mx.Pull:
        """Begin to pull what was chosen.

        Args:
            hold: Whether its memory is to be lent afterwards.
        """
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

    def fill(self, slots: Mapping[str, Slot]) -> None:
        """Fill a model with the state before processing, layer by layer as it arrives.

        Args:
            slots: The model's.

        Raises:
            ConfigError: It does not fit the model, in which nothing was changed.
            MxError: The error that ended the pull.
        """
        pull = self.pull(hold=self.lends == LOADED)
        check(pull.wait_manifest(), slots)
        for layer in pull.layers():
            copy_into(slots, layer.tensors().items())
        pull.wait()

    def agreed(self, loaded: bool) -> bool:
        """Return True if every rank has loaded what was chosen. Otherwise all give it up.

        Args:
            loaded: Whether this rank has; `error` says why not.

        Raises:
            MxError: They have not, and the option `fallback` is off.
        """
        if self.ranks.all_true(loaded):
            self.loading.loads[self.choice.state] += 1
            return True
        self.end()
        error, state = self.error, self.choice.state
        self.choice, self.error = Choice(), None
        if error is not None:
            if not self.options.fallback:
                raise error
            _let_go(error)
        self._take_over(f"{state}: {error or 'another rank could not load it'}")
        return False

    def _take_over(self, why: str) -> None:
        if not self.options.fallback:
            raise ConfigError(
                f"{self.name} can't be loaded from a peer: {why}",
                hint="`fallback` is off; with it the ordinary loader takes over",
            )
        self.loading.loads["ordinary"] += 1
        event(
            self._log,
            "engine.fallback",
            level=logging.WARNING,
            model=self.name,
            rank=str(self.ranks),
            text=f"{why}; {self._engine}'s ordinary loader takes over",
        )

    def lend_loaded(self, slots: Mapping[str, Slot]) -> None:
        """Lend the state before processing, if that is what this rank lends.

        Args:
            slots: The model's, before the engine processes its tensors.
        """
        if self.lends != LOADED:
            return
        if bad := cannot_move(slots):
            text = "%s is not lent: %s has no values before it is processed"
            self._log.warning(text, self.name, bad)
            return
        if self._pull is not None and self.choice.state == LOADED:
            pull, self._pull = self._pull, None  # the lender's, from now on
            self.loading.lender = Lender.of_pull(
                pull, self._lent_as(), self.options, engine=self._engine
            )
        else:
            self.lend(slots, before_processing=True)

    def lend(self, slots: Mapping[str, Slot], *, before_processing: bool) -> None:
        """Begin to lend what is in memory.

        Args:
            slots: The model's.
            before_processing: As for `Lender`.
        """
        self.loading.lender = Lender(
            slots,
            self.name,
            self._lent_as(),
            self.options,
            engine=self._engine,
            revision=self.revision,
            files=self._files if self._files.is_dir() else None,
            before_processing=before_processing,
        )

    def _lent_as(self) -> ProcessingKey:
        return choices.with_checkpoint(self.keys[self.lends], self.choice.checkpoint)

    def loaded(self) -> None:
        """Say how the model was loaded."""
        event(
            self._log,
            "engine.loaded",
            model=self.name,
            rank=str(self.ranks),
            state=self.choice.state or "ordinary",
            seconds=round(time.monotonic() - self._began_s, 3),
        )

    def end(self) -> None:
        """Close the pull, if it is not lent. Tensors keep its memory."""
        if self._pull is not None:
            self._pull.close()
            self._pull = None


def _let_go(error: BaseException) -> None:
    """Have an error refer to no model any more: its memory is needed."""
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found.__traceback__, found = None, found.__cause__ or found.__context__
