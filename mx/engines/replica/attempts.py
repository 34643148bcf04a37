"""What the ranks of an engine try to load, one after the other, and why each was not loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import mx
from mx.core.variant import ProcessingKey
from mx.engines.replica import choice as choices
from mx.engines.replica.choice import CHECKPOINT, Choice
from mx.engines.replica.frozen import look
from mx.engines.replica.logs import logger_of
from mx.engines.replica.names import EligibleModels
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.errors import ConfigError, MxError
from mx.log import event

#: How often to ask for a source, in seconds.
_ASK_AGAIN_S = 0.5
#: What a snapshot of which nothing can be loaded counts as, among the states that have failed.
SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class Attempts:
    """What all ranks of an engine try to load: the best of what has not failed yet, the same on
    each. That is a state of the engine's, then the checkpoint, then what the ordinary loader finds.

    The attributes are as for `RankRun`; `failed` has by name and state why what was chosen could
    not be loaded, in the order of the choices.
    """

    engine: str
    meant: EligibleModels
    options: LoaderOptions
    keys: Mapping[str, ProcessingKey]
    ranks: Ranks
    failed: dict[tuple[str, str], str] = field(default_factory=dict)

    def first(self) -> Choice:
        """Return what to load first, which sources have the settings' `wait_s` to appear for.

        Raises:
            ConfigError: There is nothing to pull, and the ordinary loader is not to take over.
        """
        return self._next(self.options.settings.wait_s, None)

    def after(self, failed: Choice, error: Exception | None) -> Choice:
        """Return what to load now.

        Args:
            failed: What at least one rank could not load.
            error: Why this rank could not; None if it could.

        Raises:
            Exception: `error`, if nothing is left, and the ordinary loader is not to take over.
            ConfigError: Likewise, without an error.
        """
        why = str(error or "another rank could not load it")
        self.failed[failed.snapshot or failed.name, failed.state] = why
        try:
            return self._next(0.0, error)
        finally:
            del error  # its traceback has this frame

    def _next(self, wait_s: float, error: Exception | None) -> Choice:
        """Return the best that is left, and say why it is not better; `wait_s` is how long to wait
        for a source."""
        mine = self._listed(wait_s) if self.ranks.first else Choice()
        chosen = Choice.decode(self.ranks.from_first(mine.encode()))
        # Each rank's folder has to allow what the first rank has chosen.
        allowed = not self.meant.refused and chosen.identity == self.meant.identity
        if not self.ranks.all_true(allowed or not chosen.state):
            why = self.meant.refused or "the folders of the ranks have different weights"
            chosen = Choice(why=why)
        reasons = [f"{state}: {why}" for (_, state), why in self.failed.items()]
        if chosen.why and (chosen.refused or not chosen.state):
            reasons.append(chosen.why)
        name = chosen.name or self.meant.name
        if not chosen.state:
            self._take_over(name, "; ".join(reasons), error)
        elif reasons:
            what = chosen.state if chosen.state == CHECKPOINT else f"{chosen.state} state"
            self._say_refused(name, f"{'; '.join(reasons)}; its {what} is loaded")
        return chosen

    def _say_refused(self, name: str, text: str) -> None:
        event(
            logger_of(self.engine), "engine.refused", level=logging.WARNING, model=name, text=text
        )

    def _take_over(self, name: str, why: str, error: Exception | None) -> None:
        """Say that the ordinary loader takes over, or raise that it does not. Where mx got the
        engine's files from a peer there is nothing on disk that it could load."""
        options = self.options
        falls_back = not self.meant.pin if options.fallback is None else options.fallback
        if options.files or not falls_back:
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame
            if options.files:
                hint = f"{self.engine} has its configuration from a peer, and no weights of it: "
                hint += f"serve the weights, too, or give {self.engine} a folder that has both"
            elif options.fallback is None:
                hint = 'a pin allows no other weights; "fallback": true has the ordinary loader'
                hint += " take over"
            else:
                hint = "`fallback` is off; with it the ordinary loader takes over"
            raise ConfigError(f"{name} can't be loaded from a peer: {why}", hint=hint)
        event(
            logger_of(self.engine),
            "engine.fallback",
            level=logging.WARNING,
            model=name,
            rank=str(self.ranks),
            text=f"{why}; {self.engine}'s ordinary loader takes over",
        )

    def _listed(self, wait_s: float) -> Choice:
        """Return the best that is listed and has not failed."""
        if self.meant.refused:
            return Choice(why=self.meant.refused)
        if (frozen := self._frozen()) is not None:
            return frozen
        until_s = time.monotonic() + wait_s
        while True:
            found = Choice()
            for name in self.meant.names:
                found = self._best(name)
                if found.state:
                    return replace(found, name=name, identity=self.meant.identity)
            if time.monotonic() >= until_s:
                return found
            time.sleep(_ASK_AGAIN_S)

    def _frozen(self) -> Choice | None:
        """Return what is left of the snapshot that the options name; None for nothing."""
        folder = self.options.snapshot
        if not folder or (folder, SNAPSHOT) in self.failed:
            return None
        keys = {
            state: key for state, key in self.keys.items() if (folder, state) not in self.failed
        }
        found = look(folder, keys, self.meant, self.options.settings)
        if found.state and (folder, found.state) not in self.failed:
            return replace(found, identity=self.meant.identity)
        self.failed[folder, SNAPSHOT] = found.why
        return None

    def _best(self, name: str) -> Choice:
        meant = self.meant
        keys = {each: key for each, key in self.keys.items() if (name, each) not in self.failed}
        is_left = (name, CHECKPOINT) not in self.failed
        pinned = Choice(CHECKPOINT, meant.revision, meant.pin[: choices.CHECKPOINT_DIGITS])
        try:
            found = self._look(name, keys) if keys or not meant.pin else pinned
        except MxError as error:
            found = Choice(why=str(error))
            if meant.pin and is_left:
                self._say_refused(name, f"{error}; its pinned {CHECKPOINT} is loaded")
                found = pinned
        if found.state == CHECKPOINT and not is_left:
            return Choice(why=found.why, refused=found.refused)
        return found

    def _look(self, name: str, keys: Mapping[str, ProcessingKey]) -> Choice:
        settings, identity = self.options.settings, self.meant.identity
        found = choices.look(
            name,
            keys,
            revision=self.meant.revision,
            checkpoint=self.options.checkpoint,
            pin=self.meant.pin,
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
