"""What one name stands for: weights, their files, and the sources that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import Membership, membership


@dataclass(slots=True)
class _Files:
    """One packaging: a manifest with it, its pin in hexadecimal, and how many sources have it."""

    ref: ManifestRef
    pin: str
    sources: int = 0


@dataclass(slots=True, eq=False)
class Binding:
    """The weights and the files of one variant.

    `member` says which bundle the variant is a rank of. `number` orders the bindings of a name by
    age. `address` is where its first source registered from. `bound` is False if the name does not
    stand for these weights: then readers find them by their pin. `commitment` is that of the first
    source that has proved one, b"" before. `issued_s` is when the receipt was issued that came with
    it after a restart of the coordinator, 0.0 without one; `restored` is True if that was of an
    earlier life of the coordinator. `sources` maps the ids of the sources, in order of
    registration, to their packaging (b"": no files). `ref` is a manifest with the bound files:
    those of the first origin that had any. `published_s` is when its owner has published it last,
    in seconds since 1970, 0.0 if that is not known. With `outdated` it has come to light since that
    the name has meant others before, with a higher number. `lapses_at_s` is until when it keeps its
    place among those that contest a name, though it has no source. With `lent` a lender key has
    made it: its owner may replace it. `commitment` is then the one that has certified that key.
    `vouch` is what the owner says of it (`mx.core.vouching`), b"" if that is not known.
    """

    key: ModelKey
    ref: ManifestRef
    number: int
    address: str
    bound: bool
    commitment: bytes = b""
    issued_s: float = 0.0
    restored: bool = False
    sources: dict[str, bytes] = field(default_factory=dict)
    member: Membership = field(init=False)
    _packaged: bool = False  # by an origin; a relay's files give way to an origin's
    _all_files: dict[bytes, _Files] = field(default_factory=dict)
    lapses_at_s: float = math.inf
    published_s: float = 0.0
    outdated: bool = False
    lent: bool = False
    vouch: bytes = b""

    def __post_init__(self) -> None:
        self.member = membership(self.key.variant)

    @property
    def identity(self) -> bytes:
        """The weights."""
        return self.ref.identity

    def is_held_by(self, commitment: bytes) -> bool:
        """Return True while it has a source, if the first that has proved a commitment proved
        this one."""
        return bool(self.sources) and self.commitment == commitment and not self.lent

    def join(self, source_id: str, ref: ManifestRef, *, origin: bool) -> bool:
        """Add a source, or renew it. Returns True if it binds its files.

        Args:
            source_id: The source.
            ref: The source's manifest.
            origin: False for a relay, which binds no files.
        """
        had = self.sources.get(source_id)
        self.lapses_at_s = math.inf
        self.sources[source_id] = ref.packaging
        self._all_files.setdefault(ref.packaging, _Files(ref, ref.pin.hex())).sources += 1
        if had is not None:
            self._lose_files(had)
        if not (origin and ref.packaging) or self._packaged:
            return False
        self._packaged = True
        self.ref, before = ref, self.ref
        self._lose_files(before.packaging, 0)
        return before.packaging != ref.packaging

    def leave(self, source_id: str) -> None:
        """Remove a source."""
        self._lose_files(self.sources.pop(source_id))

    def _lose_files(self, packaging: bytes, sources: int = 1) -> None:
        files = self._all_files[packaging]
        files.sources -= sources
        if not files.sources and packaging != self.ref.packaging:
            del self._all_files[packaging]

    def pinned(self, pin: str) -> list[ManifestRef]:
        """Return manifests with the files whose pin begins with `pin`: the bound ones, and those of
        the sources with other files. `pin` is in lower case."""
        return [files.ref for files in self._all_files.values() if files.pin.startswith(pin)]
