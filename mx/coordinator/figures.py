"""What a coordinator counts for its metrics. It follows the state, as watchers do."""

from __future__ import annotations

from collections import Counter

from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState
from mx.core.changes import ChangeKind, Tail


class Figures:
    """The figures of one coordinator, from now on. On its event loop.

    `came` counts the sources that were listed, or came back, `gone` those that left, by reason.
    """

    def __init__(self, state: CoordinatorState, servicer: CoordinatorServicer) -> None:
        """
        Args:
            state: The coordinator's.
            servicer: The coordinator's.
        """
        self.state, self.servicer = state, servicer
        self.gone: Counter[str] = Counter()
        self._name_of: dict[str, str] = {}  # by source
        self._epoch, self._epochs = state.epoch, 0
        self.came = 0
        state.follow(self._on_changes)
        self.came = 0  # those were there

    @property
    def sources(self) -> Counter[str]:
        """How many sources are listed, by the model's name."""
        return Counter(self._name_of.values())

    @property
    def epochs(self) -> int:
        """How often the state's epoch was seen to change."""
        if self.state.epoch != self._epoch:
            self._epoch, self._epochs = self.state.epoch, self._epochs + 1
        return self._epochs

    def _on_changes(self, tail: Tail) -> None:
        _ = self.epochs
        if tail.begins_again:
            there = {change.record.source_id for change in tail.changes}
            for lost in self._name_of.keys() - there:
                del self._name_of[lost]
                self.gone["lost"] += 1
        for change in tail.changes:
            source_id = change.record.source_id
            if change.kind is ChangeKind.GONE:
                del self._name_of[source_id]
                self.gone[change.reason] += 1
            else:
                self.came += source_id not in self._name_of
                self._name_of[source_id] = change.record.model.name
