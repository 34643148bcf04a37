"""All that a store keeps of one name: what is bound, what contests it, and who may bind it next.

Pure: the methods here answer, and `mx.core.bindings` changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mx.core.binding import Binding
from mx.core.bound_name import BoundName, Revision
from mx.core.ownership import Receipt
from mx.core.revisions import MAIN, is_main, main_revision, update_number
from mx.core.types import ManifestRef, ModelKey


@dataclass(frozen=True, slots=True)
class ReservedName:
    """A name that nothing is bound under any more, and that its last owner has until `until_s`.

    `address` is where its last weights were registered from.
    """

    owner: bytes
    issued_s: float
    until_s: float
    address: str


@dataclass(slots=True)
class NameState:
    """What a store keeps of one name.

    `contests` are the bindings whose weights the name does not stand for, the oldest first. `meant`
    has what `means` says of each bundle of several ranks. `numbers` is the number of the last
    binding that was made.
    """

    name: str
    bound: BoundName | None = None
    kept: ReservedName | None = None
    contests: list[Binding] = field(default_factory=list)
    meant: dict[str, str] = field(default_factory=dict)
    numbers: int = 0

    @property
    def empty(self) -> bool:
        """True if there is nothing to keep."""
        return self.bound is None and self.kept is None and not self.contests

    @property
    def due_s(self) -> float:
        """When time has something to end here."""
        due_s = min((each.lapses_at_s for each in self.entries.values()), default=math.inf)
        due_s = min((due_s, *(each.lapses_at_s for each in self.contests)))
        return due_s if self.kept is None else min(due_s, self.kept.until_s)

    @property
    def entries(self) -> Mapping[str, Revision]:
        """The bound revisions."""
        return {} if self.bound is None else self.bound.revisions

    @property
    def claimed(self) -> BoundName | None:
        """The bound name, or the one that is kept for its last owner and has no revisions; None if
        it is free."""
        if self.bound is not None or self.kept is None:
            return self.bound
        return BoundName(self.kept.owner, self.kept.issued_s)

    def bindings(self) -> Iterator[Binding]:
        """Yield all bindings, those that contest another one last."""
        for entry in self.entries.values():
            yield from entry.variants.values()
        yield from self.contests

    def get(self, key: ModelKey) -> Binding | None:
        """Return the binding of a key, or None if it is not bound."""
        return None if self.bound is None else self.bound.get(key)

    def owned_by(self, commitment: bytes) -> bool:
        """Return True if a commitment is that of the bound name's owner."""
        return self.bound is not None and self.bound.owned_by(commitment)

    def receipt_of(self, binding: Binding) -> Receipt | None:
        """Return what a binding's receipt says, without a time; None if there is none to give: the
        name does not stand for it, or has no owner."""
        key, name = binding.key, self.bound
        if name is None or not binding.bound or not name.owner:
            return None
        base, bundle = name.revisions[key.revision].base, binding.member.bundle
        completed = -1
        if not binding.member.alone:
            completed = name.completed(name.root(key.revision), bundle)
        newest, newest_s = name.newest(key), name.published_s(name.root(key.revision), bundle)
        return Receipt(
            key, binding.identity, name.owner, base, newest,
            completed=completed, lent=binding.lent, newest_s=newest_s,
        )  # fmt: skip

    def outdated_by(self, binding: Binding) -> str:
        """Return the revision that a binding's sources have to update, so that the name means what
        they have published; "" for none."""
        if not binding.outdated or self.bound is None:
            return ""
        family = self.bound.family(self.bound.root(binding.key.revision), binding.key.variant)
        return family[max(family)].key.revision if family else ""

    def contest(self, key: ModelKey, ref: ManifestRef) -> Binding | None:
        """Return the binding of these weights that contests a key, or None; of two the one in this
        layout."""
        found = [b for b in self.contests if (b.key, b.identity) == (key, ref.identity)]
        return min(found, key=lambda each: each.ref.layout != ref.layout, default=None)

    def numbered(self, key: ModelKey, number: int) -> Binding:
        """Return the binding of a key that has this number."""
        bound = self.get(key)
        if bound is not None and bound.number == number:
            return bound
        return next(each for each in self.contests if each.number == number)

    def means(self, bundle: str) -> str:
        """Return the revision that NAME means for all ranks of a bundle, "" for nothing.

        It is the newest that its owner has published: in which all ranks have been there, whether
        or not they are now; before there is one, the oldest. As long as the name is bound that is
        never an older one than before.
        """
        if self.bound is None:
            return ""
        mains = [r for r, e in self.entries.items() if bundle in e.bundles and is_main(r)]
        newest = self.bound.completed(MAIN, bundle)
        if newest >= 0:
            return main_revision(newest)
        return min(mains, key=update_number, default="")
