"""What one name stands for: weights, their files, and the sources that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import membership


@dataclass(slots=True)
class _Files:
    """One packaging: a manifest with it, its pin in hexadecimal, and how many sources have it."""

    ref: ManifestRef
    pin: str
    sources: int = 0


class Binding:
    """The weights and the files of one variant.

    `member` says which bundle the variant is a rank of. `number` orders bindings by age. `address`
    is where its first source registered from. `commitment` is that of the first source
    that has proved one, b"" before. `issued_s` is when the receipt was issued that came with it
    after a restart of the coordinator, 0.0 without one; `restored` is True if that was of an
    earlier life of the coordinator. `bound` is False if the name does not stand
    for these weights: then readers find them by their pin. `sources` maps the ids of the sources,
    in order of registration, to their packaging (b"": no files). `ref` is a manifest with the
    bound files: those of the first origin that had any.
    """

    __slots__ = (
        "key", "member", "number", "address", "commitment", "issued_s", "restored", "bound",
        "sources", "ref", "_packaged", "_all_files",
    )  # fmt: skip

    def __init__(
        self, key: ModelKey, ref: ManifestRef, number: int, address: str, *, bound: bool
    ) -> None:
        """
        Args:
            key: The name, revision and variant.
            ref: The manifest of the first source.
            number: Larger than that of each binding before.
            address: Where the first source registers from.
            bound: True if the key stands for these weights.
        """
        self.key = key
        self.member = membership(key.variant)
        self.number = number
        self.address = address
        self.commitment = b""
        self.issued_s = 0.0
        self.restored = False
        self.bound = bound
        self.sources: dict[str, bytes] = {}
        self.ref = ref
        self._packaged = False  # by an origin; a relay's files give way to an origin's
        self._all_files: dict[bytes, _Files] = {}

    @property
    def identity(self) -> bytes:
        """The weights."""
        return self.ref.identity

    def is_held_by(self, commitment: bytes) -> bool:
        """Return True while it has a source, if the first that has proved a commitment proved
        this one."""
        return bool(self.sources) and self.commitment == commitment

    def join(self, source_id: str, ref: ManifestRef, *, origin: bool) -> bool:
        """Add a source, or renew it. Returns True if it binds its files.

        Args:
            source_id: The source.
            ref: The source's manifest.
            origin: False for a relay, which binds no files.
        """
        had = self.sources.get(source_id)
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


class Contests:
    """The bindings whose name does not stand for their weights, by name, oldest first."""

    def __init__(self) -> None:
        self._names: dict[str, list[Binding]] = {}

    def __iter__(self) -> Iterator[Binding]:
        for bindings in self._names.values():
            yield from bindings

    def of(self, name: str) -> list[Binding]:
        """Return those of one name."""
        return list(self._names.get(name, ()))

    def find(self, key: ModelKey, ref: ManifestRef) -> Binding | None:
        """Return the one of this key and these weights, or None; of two the one in this layout."""
        named = self._names.get(key.name, ())
        found = [each for each in named if (each.key, each.identity) == (key, ref.identity)]
        return min(found, key=lambda each: each.ref.layout != ref.layout, default=None)

    def add(self, binding: Binding) -> None:
        """Add a binding, as the youngest."""
        self._names.setdefault(binding.key.name, []).append(binding)

    def remove(self, binding: Binding) -> None:
        """Remove a binding."""
        bindings = self._names[binding.key.name]
        bindings.remove(binding)
        if not bindings:
            del self._names[binding.key.name]
