"""Chooses among the sets that a coordinator lists: by a trusted signer, for this environment."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mx import config
from mx.artifacts import environment
from mx.artifacts.carry import FetchedDocument, ListedSet, fetch_document, find
from mx.artifacts.trust import Trust
from mx.core.reference import parse_reference
from mx.errors import ArtifactError, ConfigError, MxError

#: Documents that are fetched at most: others may list any number of sets.
_MOST_DOCUMENTS = 16
#: The most time before the last document is asked for: their sources may be slow on purpose.
_SEARCH_S = 60.0
#: Differences that a reason names at most.
_MOST_DIFFERENCES = 8


@dataclass(frozen=True)
class ChosenSet:
    """A set that may be used here. `signer` is its signer's name in the trust file."""

    found: FetchedDocument
    signer: str


class Search:
    """A search for the sets of one kind that may be used here.

    Attributes:
        model: The name of the model that they are for.
        reasons: Why sets, or all, are not used: one line each.
    """

    def __init__(
        self,
        model: str,
        kind: str,
        *,
        trust: str | Path,
        pin: str = "",
        fields: Mapping[str, str] | None = None,
        coordinator: str | None = None,
        settings: config.Settings | None = None,
    ) -> None:
        """
        Args:
            model: The model's name, as for `mx.pull`.
            kind: The kind of the sets.
            trust: The trust file.
            pin: The pin of the weights, which a set that is for certain weights has to name.
            fields: Fields of the environment that the caller knows.
            coordinator: HOST:PORT; None takes the address in the settings.
            settings: Settings to use; None loads them from the environment and the files.

        Raises:
            ConfigError: An argument is wrong, or the trust file is malformed or not this user's
                alone.
        """
        self.model = parse_reference(model).name
        if not self.model:
            raise ConfigError("no model is named", hint="name the one that the sets are for")
        self.coordinator, self.settings = coordinator, settings or config.load()
        self.reasons: list[str] = []
        self._kind, self._pin, self._fields = kind, pin, dict(fields or {})
        self._trust = Trust.load(Path(trust))

    def choices(self) -> list[ChosenSet]:
        """Return the sets that may be used, the newest first. Faults of other sets are not errors.

        Raises:
            ConfigError: A setting is wrong.
        """
        try:
            found = list(self._fitting())
        except ConfigError:
            raise
        except MxError as error:
            self.reasons.append(error.message)
            return []
        return sorted(found, key=lambda e: e.found.signed.document.created_s, reverse=True)

    def refuse(self, set_id: str, why: str) -> None:
        """Note why a set is not used."""
        self.reasons.append(f"the set {set_id[:8]} is not used: {why}")

    def _fitting(self) -> Iterator[ChosenSet]:
        until_s = time.monotonic() + _SEARCH_S
        for listed in self._listed():
            if time.monotonic() >= until_s:
                self.refuse(listed.set_id, "sources of others took too long")
                continue
            try:
                yield self._checked(listed)
            except (MxError, OSError) as error:  # OSError: an engine's files can't be read
                self.refuse(listed.set_id, getattr(error, "message", str(error)))

    def _listed(self) -> list[ListedSet]:
        found = find(self.model, coordinator=self.coordinator, settings=self.settings)
        found = [each for each in found if each.kind == self._kind]
        if not found:
            self.reasons.append(f"no set of the kind {self._kind} is listed for {self.model}")
        known = {key.hex() for key in self._trust.signers}
        # Those that claim to be of a known signer come first, so that others can't crowd them out.
        found.sort(key=lambda each: not any(key.startswith(each.signer) for key in known))
        if len(found) > _MOST_DOCUMENTS:
            self.reasons.append(f"{len(found)} sets are listed; {_MOST_DOCUMENTS} were looked at")
        return found[:_MOST_DOCUMENTS]

    def _checked(self, listed: ListedSet) -> ChosenSet:
        found = fetch_document(
            listed, trust=self._trust, coordinator=self.coordinator, settings=self.settings
        )
        signer = self._trust.check(found.signed, self.model, time.time())
        document = found.signed.document
        if document.kind != self._kind:
            raise ArtifactError(f"it is of the kind {document.kind}")
        if document.pin != self._pin:
            raise ArtifactError(f"it is for the weights {document.pin[:16]}, not {self._pin[:16]}")
        theirs = document.environment
        ours = environment.here(theirs.get("engine", ""), self._fields, names=theirs)
        if differ := environment.differences(ours, theirs):
            shown = [
                f"{each.field} is {each.first or 'absent'} here, {each.second or 'absent'} there"
                for each in differ[:_MOST_DIFFERENCES]
            ]
            raise ArtifactError(f"its environment differs: {'; '.join(shown)}")
        return ChosenSet(found, signer)
