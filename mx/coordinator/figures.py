"""What a coordinator counts for its metrics. It follows the state, as watchers do."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import State
from mx.core.changes import ChangeKind, Tail


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one moment.

    `sources` counts the listed ones, each of which has a lease, by the model's name. `came` and
    `gone` count since the figures began, `gone` by reason; `epochs` the changes of the state's
    epoch. `streams` are open, by kind; `pulls` were reported lately, by phase.
    """

    sources: Counter[str]
    came: int
    gone: Counter[str]
    epochs: int
    streams: dict[str, int]
    pulls: Counter[str]
    document_bytes: int


class Figures:
    """The figures of one coordinator, from now on. On its event loop."""

    def __init__(self, state: State, servicer: CoordinatorServicer) -> None:
        """
        Args:
            state: The coordinator's.
            servicer: The coordinator's.
        """
        self._state = state
        self._servicer = servicer
        self._name_of: dict[str, str] = {}  # by source
        self._sources: Counter[str] = Counter()
        self._came = 0
        self._gone: Counter[str] = Counter()
        self._epoch, self._epochs = state.epoch, 0
        state.follow(self._on_changes)
        self._came = 0  # since the figures began

    def snapshot(self) -> Snapshot:
        """Return the figures of this moment."""
        self._look_at_epoch()
        return Snapshot(
            Counter(self._sources),
            self._came,
            Counter(self._gone),
            self._epochs,
            self._servicer.streams(),
            self._servicer.pulls_by_phase(),
            self._state.document_bytes,
        )

    def _look_at_epoch(self) -> None:
        if self._state.epoch != self._epoch:
            self._epoch, self._epochs = self._state.epoch, self._epochs + 1

    def _on_changes(self, tail: Tail) -> None:
        self._look_at_epoch()
        if tail.begins_again:
            self._begin_again(tail)
            return
        for change in tail.changes:
            if change.kind is ChangeKind.LAYERS:
                continue
            source_id, name = change.record.source_id, change.record.model.name
            if change.kind is ChangeKind.GONE:
                self._forget(source_id)
                self._gone[change.reason] += 1
                continue
            self._came += source_id not in self._name_of
            self._put(source_id, name)

    def _begin_again(self, tail: Tail) -> None:
        there = {change.record.source_id: change.record.model.name for change in tail.changes}
        for source_id in [each for each in self._name_of if each not in there]:
            self._forget(source_id)
            self._gone["lost"] += 1
        for source_id, name in there.items():
            self._came += source_id not in self._name_of
            self._put(source_id, name)

    def _put(self, source_id: str, name: str) -> None:
        self._forget(source_id)
        self._name_of[source_id] = name
        self._sources[name] += 1

    def _forget(self, source_id: str) -> None:
        name = self._name_of.pop(source_id, None)
        if name is not None:
            self._sources[name] -= 1
            if not self._sources[name]:
                del self._sources[name]
