"""What one name stands for: weights, their files, and the groups of sources that hold them.

The sources of one group hold the weights in one layout and chunk size, so that they can trade
chunks. Mostly there is one group, since sources adopt the layout of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import membership


@dataclass(slots=True, eq=False)
class Group:
    """The sources that hold some weights in the layout and the chunk size of `ref`.

    `number` orders groups by age. `address` is where its first source registered from. `sources`
    maps the ids of the sources, in order of registration, to their packaging (b"": no files).
    """

    ref: ManifestRef
    number: int
    address: str
    sources: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Files:
    """One packaging: a manifest with it, its pin in hexadecimal, and how many sources have it."""

    ref: ManifestRef
    pin: str
    sources: int = 0


class Binding:
    """The weights and the files of one variant.

    `member` says which bundle the variant is a rank of. `commitment` is that of the first source
    that has proved one, b"" before. `issued_s` is when the receipt was issued that came with it
    after a restart of the coordinator, 0.0 without one; `restored` is True if that was of an
    earlier life of the coordinator. `bound` is False if the name does not stand
    for these weights: then readers find them by their pin. `groups` has the oldest group first, and
    is never empty once a source has joined. `files` is a manifest with the bound files: those of
    the first origin that had any.
    """

    __slots__ = (
        "key", "member", "identity", "commitment", "issued_s", "restored", "bound", "groups",
        "files", "_packaged", "_all_files",
    )  # fmt: skip

    def __init__(self, key: ModelKey, ref: ManifestRef, *, bound: bool) -> None:
        """
        Args:
            key: The name, revision and variant.
            ref: The manifest of the first source.
            bound: True if the key stands for these weights.
        """
        self.key = key
        self.member = membership(key.variant)
        self.identity = ref.identity
        self.commitment = b""
        self.issued_s = 0.0
        self.restored = False
        self.bound = bound
        self.groups: list[Group] = []
        self.files = ref
        self._packaged = False  # by an origin; a relay's files give way to an origin's
        self._all_files: dict[bytes, _Files] = {}

    @property
    def ref(self) -> ManifestRef:
        """The manifest with the layout of the oldest group."""
        return self.ref_of(self.groups[0])

    def ref_of(self, group: Group) -> ManifestRef:
        """Return the manifest with the layout of a group, and the bound files."""
        return group.ref.with_files_of(self.files)

    @property
    def sources(self) -> list[str]:
        """The ids of all sources."""
        return [source_id for group in self.groups for source_id in group.sources]

    @property
    def in_use(self) -> bool:
        """True while it has a source."""
        return any(group.sources for group in self.groups)

    def is_held_by(self, commitment: bytes) -> bool:
        """Return True while it has a source, if the first that has proved a commitment proved
        this one."""
        return self.in_use and self.commitment == commitment

    def group_of(self, ref: ManifestRef) -> Group | None:
        """Return the group with the layout and the chunk size of `ref`, or None."""
        return next((group for group in self.groups if group.ref.same_chunks(ref)), None)

    def join(self, group: Group, source_id: str, ref: ManifestRef, *, origin: bool) -> bool:
        """Add a source to a group, or renew it. Returns True if it binds its files.

        Args:
            group: A group of this binding.
            source_id: The source.
            ref: The source's manifest.
            origin: False for a relay, which binds no files.
        """
        had = group.sources.get(source_id)
        group.sources[source_id] = ref.packaging
        self._all_files.setdefault(ref.packaging, _Files(ref, ref.pin.hex())).sources += 1
        if had is not None:
            self._lose_files(had)
        if not (origin and ref.packaging) or self._packaged:
            return False
        self._packaged = True
        self.files, before = ref, self.files
        self._lose_files(before.packaging, 0)
        return before.packaging != ref.packaging

    def leave(self, group: Group, source_id: str) -> None:
        """Remove a source."""
        self._lose_files(group.sources.pop(source_id))

    def _lose_files(self, packaging: bytes, sources: int = 1) -> None:
        files = self._all_files[packaging]
        files.sources -= sources
        if not files.sources and packaging != self.files.packaging:
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

    def find(self, key: ModelKey, identity: bytes) -> Binding | None:
        """Return the one of this key and identity, or None."""
        for binding in self._names.get(key.name, ()):
            if binding.key == key and binding.identity == identity:
                return binding
        return None

    def add(self, binding: Binding) -> None:
        """Add a binding, as the youngest."""
        self._names.setdefault(binding.key.name, []).append(binding)

    def remove(self, binding: Binding) -> None:
        """Remove a binding."""
        bindings = self._names[binding.key.name]
        bindings.remove(binding)
        if not bindings:
            del self._names[binding.key.name]


def by_age(bindings: Iterable[Binding]) -> list[tuple[Binding, Group]]:
    """Return the groups of all bindings, oldest first."""
    groups = [(binding, group) for binding in bindings for group in binding.groups]
    return sorted(groups, key=lambda each: each[1].number)
