"""What a coordinator's listings say of a model and of a source."""

from __future__ import annotations

from dataclasses import dataclass

from mx.core.types import ManifestRef, ModelKey, SourceRecord
from mx.units import count, format_bytes


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
