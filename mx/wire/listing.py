"""Lists that a coordinator answers with, read entry by entry: a bad one costs no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from mx.core.types import ManifestRef, ModelKey, SourceRecord
from mx.errors import PeerProtocolError
from mx.units import count, format_bytes
from mx.wire.status import Remote

_log = logging.getLogger(__name__)

_M = TypeVar("_M")
_T = TypeVar("_T")
#: So many different complaints are made; what is looked at again and again repeats them.
_MAX_SAID = 64


@dataclass(frozen=True, slots=True, repr=False)
class ModelStatus:
    """`nbytes` and `layers` as an origin registered them; 0 where none is left."""

    model: ModelKey
    ref: ManifestRef
    nbytes: int
    layers: int
    sources: int

    def __repr__(self) -> str:
        """One line: its name, the beginning of its identity, how large it is."""
        return (
            f"<ModelStatus {self.model}@{self.ref.identity.hex()[:16]}: "
            f"{format_bytes(self.nbytes)} in {count(self.layers, 'layer')}, "
            f"{count(self.sources, 'source')}>"
        )


@dataclass(frozen=True, slots=True, repr=False)
class SourceStatus:
    """A source as the coordinator lists it; `gb_per_s` is what it gave lately."""

    record: SourceRecord
    lease_left_s: float
    readers: int
    gb_per_s: float

    def __repr__(self) -> str:
        """One line: what it serves, where, to how many."""
        record = self.record
        return (
            f"<SourceStatus {record.model} at {record.endpoint}: {record.role.value}, "
            f"{record.state.value}, {count(self.readers, 'reader')}>"
        )


class Lists:
    """Reads the lists of one coordinator. Says once of each bad entry that it was skipped."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._said: set[tuple[str, str]] = set()

    def read(self, what: str, messages: Iterable[_M], decode: Callable[[_M], _T]) -> list[_T]:
        """Decode each message, and leave out those that `decode` refuses with PeerProtocolError.

        Args:
            what: names an entry in the warning: "source".
        """
        found = []
        for message in messages:
            try:
                found.append(decode(message))
            except PeerProtocolError as error:
                self._skipped(what, error.message)
        return found

    def _skipped(self, what: str, why: str) -> None:
        if (what, why) in self._said or len(self._said) >= _MAX_SAID:
            return
        self._said.add((what, why))
        text = " ".join(why.split())[:300]
        _log.warning(
            "skipped a %s that the coordinator at %s lists: %s", what, self._remote.address, text
        )
