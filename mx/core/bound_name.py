"""One bound name: its owner, its revisions, and which of them an update may follow. Pure.

The owner is the commitment that bound the name first (`mx.core.ownership`). Only the owner
binds further revisions and variants. A name without a commitment has no owner: it is never updated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mx.core.binding import Binding
from mx.core.ownership import Receipt
from mx.core.revisions import MAIN, is_main, main_revision, update_number
from mx.core.types import NAME_CHARS, ManifestRef, ModelKey
from mx.core.variant import membership
from mx.errors import BindingError


@dataclass(slots=True)
class Revision:
    """A bound revision. `base` is the one that it is an update of, "" for none."""

    base: str = ""
    variants: dict[str, Binding] = field(default_factory=dict)
    lapses_at_s: float = math.inf
    bundles: set[str] = field(default_factory=set)  # of which a rank is bound here
    completed: set[str] = field(default_factory=set)  # those that have been complete


@dataclass(slots=True)
class BoundName:
    """A name, and what it stands for. `issued_s` is when the receipt was issued that says whose it
    is (`Receipt.weight`), 0.0 without one. Until `restores_until_s` receipts of an earlier life of
    the coordinator count against it, also if this life has ended since."""

    owner: bytes
    issued_s: float = 0.0
    restores_until_s: float = -math.inf
    revisions: dict[str, Revision] = field(default_factory=dict)
    #: By root and variant the highest number of a revision that is bound no more, or was in an
    #: earlier life; by root and bundle that of one that was complete.
    _reached: dict[tuple[str, str], int] = field(default_factory=dict)
    #: When these were published, as far as it is known, in seconds since 1970.
    _reached_s: dict[tuple[str, str], float] = field(default_factory=dict)
    #: As there, those of updates that are still to come.
    _awaited: dict[tuple[str, str], int] = field(default_factory=dict)
    _awaited_s: dict[tuple[str, str], float] = field(default_factory=dict)

    def get(self, key: ModelKey) -> Binding | None:
        """Return the binding of a revision and a variant, or None."""
        entry = self.revisions.get(key.revision)
        return None if entry is None else entry.variants.get(key.variant)

    def owned_by(self, commitment: bytes) -> bool:
        """Return True if this commitment is the owner's."""
        return bool(commitment) and commitment == self.owner

    def root(self, revision: str) -> str:
        """Return the revision that this one is an update of, or `revision` if it is not an
        update."""
        entry = self.revisions.get(revision)
        if entry is not None and entry.base:
            return entry.base
        return MAIN if is_main(revision) else revision

    def in_use(self, revision: str) -> bool:
        """Return True if the revision has a source, or an update of it is bound."""
        if any(binding.sources for binding in self.revisions[revision].variants.values()):
            return True
        return any(entry.base == revision for entry in self.revisions.values())

    def superseded(self, revision: str) -> bool:
        """Return True if another revision of its family is bound: a peer that still reads this
        one may yet register it."""
        root = self.root(revision)
        return any(other != revision and self.root(other) == root for other in self.revisions)

    def remember(self, receipt: Receipt) -> None:
        """Record which updates there were when a receipt was issued."""
        root = receipt.base or self.root(receipt.key.revision)
        published_s = receipt.newest_s or receipt.issued_s
        if self._differs(receipt):  # no revision here has these weights: a number that is free
            self._reach(root, receipt.key.variant, max(receipt.newest + 1, 2), 0.0)
        bundle = membership(receipt.key.variant).bundle
        self._reach(root, receipt.key.variant, receipt.newest, published_s)
        self._reach(root, bundle, receipt.completed, published_s)

    def await_update(self, root: str, bundle: str, published_s: float) -> None:
        """Let the name mean an update of its newest revision that is still to come, if its owner
        has published that already, and later; 0.0 for none. If what was awaited has come, it is
        awaited no longer."""
        at, known_s = (root, bundle), self.published_s(root, bundle)
        awaited_s = max(published_s, self._awaited_s.get(at, 0.0))
        self._awaited.pop(at, None)
        if awaited_s > known_s:
            self._awaited[at] = max(self._completed(root, bundle) + 1, 2)
            self._awaited_s[at] = awaited_s

    def published_s(self, root: str, bundle: str) -> float:
        """Return when the newest revision of a bundle was published, as far as that is known, 0.0
        for none."""
        newest, found = self._completed(root, bundle), [0.0]
        for revision, entry in self.revisions.items():
            if self.root(revision) == root and update_number(revision, root) == newest:
                found += [
                    b.published_s for b in entry.variants.values() if b.member.bundle == bundle
                ]
        if self.reached(root, bundle) == newest:
            found.append(self._reached_s.get((root, bundle), 0.0))
        return max(found)

    def behind(self, key: ModelKey) -> bool:
        """Return True if NAME means a newer revision of a key's family."""
        root = self.root(key.revision)
        number = update_number(key.revision, root)
        return number < self.completed(root, membership(key.variant).bundle)

    def unlike(self, binding: Binding) -> bool:
        """Return True if NAME means a revision of several ranks that have been there in an earlier
        life, and a rank is bound as one of them that may be of another publication."""
        key, member = binding.key, binding.member
        if member.alone or member.bundle in self.revisions[key.revision].completed:
            return False
        root = self.root(key.revision)
        return update_number(key.revision, root) == self.reached(root, member.bundle)

    def missed(self, receipt: Receipt) -> bool:
        """Return True if a receipt knows of newer updates, or later weights under the newest."""
        root, variant = receipt.base or self.root(receipt.key.revision), receipt.key.variant
        return (
            receipt.newest > self.newest(receipt.key._replace(revision=root))
            or receipt.completed > self.completed(root, membership(variant).bundle)
            or self._differs(receipt)
        )

    def _differs(self, receipt: Receipt) -> bool:
        """Return True if a receipt of the newest revision is of other weights than are bound as it,
        which were published later: the state is older, and has the number for others."""
        binding, newest = self.get(receipt.key), self.newest(receipt.key)
        if binding is None or not binding.member.alone or binding.identity == receipt.identity:
            return False
        number = update_number(receipt.key.revision, self.root(receipt.key.revision))
        return number == newest == receipt.newest and receipt.newest_s > binding.published_s

    def forget_revision(self, revision: str) -> Revision:
        """Remove a revision, whose number stays taken, and return it."""
        root = self.root(revision)
        entry = self.revisions.pop(revision)
        published_s = max((each.published_s for each in entry.variants.values()), default=0.0)
        for each in (*entry.variants, *entry.completed):
            self._reach(root, each, update_number(revision, root), published_s)
        return entry

    def _reach(self, root: str, variant: str, number: int, published_s: float) -> None:
        at = root, variant
        known = self.reached(root, variant), self._reached_s.get(at, 0.0)
        if number >= 0 and (number, published_s) > known:
            self._reached[at], self._reached_s[at] = number, published_s

    def reached(self, root: str, variant: str) -> int:
        """Return the highest number that a variant had in revisions that are bound no more, or a
        bundle in those that were complete; -1 for none."""
        return self._reached.get((root, variant), -1)

    def newest(self, key: ModelKey) -> int:
        """Return the number of the newest update of a variant, 0 if there is none."""
        root = self.root(key.revision)
        return max(*self.family(root, key.variant), self.reached(root, key.variant), 0)

    def completed(self, root: str, bundle: str) -> int:
        """Return the number of the newest revision in which a bundle has been complete, -1 for
        none; or of what is still to come. A variant that is not a rank of several is complete once
        it is bound."""
        return max(self._completed(root, bundle), self._awaited.get((root, bundle), -1))

    def _completed(self, root: str, bundle: str) -> int:
        numbers = [
            update_number(revision, root)
            for revision, entry in self.revisions.items()
            if self.root(revision) == root
            and (bundle in entry.completed or bundle in entry.variants)
        ]
        return max([*numbers, self.reached(root, bundle)])

    def family(self, root: str, variant: str) -> dict[int, Binding]:
        """Return the bindings of a variant in `root` and its updates, by number."""
        return {
            update_number(revision, root): entry.variants[variant]
            for revision, entry in self.revisions.items()
            if self.root(revision) == root and variant in entry.variants
        }

    def refusal(
        self, key: ModelKey, commitment: bytes, *, lends: bytes = b""
    ) -> BindingError | None:
        """Return why a source may not be the first to bind a key; None if it may. A lender key
        (`lends` is the commitment that has certified it) may in a revision of the owner's."""
        if self.owned_by(lends):
            of = self.revisions.get(key.revision, Revision()).variants.values()
            if all(binding.lent for binding in of):
                return lends_of_none(key)
        elif commitment != self.owner:
            return not_the_owner(key.name, "bind another revision or variant of it")
        newest = self.newest(key._replace(revision=MAIN))
        bound = self.family(MAIN, key.variant)
        if is_main(key.revision) and (bound or update_number(key.revision) < newest):
            number = max(bound, default=newest)
            return BindingError(
                f"{key._replace(revision=main_revision(number))} is the newest revision, and "
                f"{key.revision} would count as an update of it",
                hint=UPDATE_HINT,
            )
        return None

    def update(self, key: ModelKey, ref: ManifestRef, receipt: Receipt | None) -> ModelKey:
        """Return the key of an update.

        The newest revision of the variant has to be the one that it replaces, or an update that no
        source holds any more; or it has the same weights and is the newest that there was, and the
        source joins it. Other variants
        may have the new revision already. A rank whose weights stay the same goes on to the next
        revision with the other ranks.

        Args:
            key: Of the revision that it replaces.
            ref: The new weights.
            receipt: Of the revision that it replaces, if that is from an earlier life.

        Raises:
            BindingError: Another source has updated it to other weights.
        """
        root = (receipt.base if receipt else "") or self.root(key.revision)
        family = self.family(root, key.variant)
        replaced = update_number(key.revision, root)
        last = family[max(family)] if family else None
        bundle = membership(key.variant).bundle
        taken = max(self.reached(root, key.variant), self._completed(root, bundle))
        if last is not None and last.identity == ref.identity and max(family) >= taken:
            if last.key.revision != key.revision or last.member.alone:
                return last.key
        elif any(binding.sources for number, binding in family.items() if number > replaced):
            assert last is not None
            raise updated_by_another(key, last)
        reached = max(replaced, *family, taken)
        if receipt is not None:
            reached = max(reached, receipt.newest)
        return key._replace(revision=self._free(root, max(reached + 1, 2), key.variant))

    def _free(self, root: str, number: int, variant: str) -> str:
        """Return the first update from `number` on that does not have the variant."""
        while (revision := f"{root}.{number}") in self.revisions and (
            self.root(revision) != root or variant in self.revisions[revision].variants
        ):
            number += 1
        if len(revision) > NAME_CHARS:
            raise BindingError(
                f"an update of {root[:40]}… would be a revision of {len(revision)} characters, "
                f"more than {NAME_CHARS}",
                hint="register these weights under a shorter `revision`",
            )
        return revision


#: What to do about weights that a name does not stand for, for the owner of the name.
UPDATE_HINT = "register them as an update (`update`), or under another name or `revision`"


def updated_by_another(key: ModelKey, other: Binding) -> BindingError:
    """Return the error for an update of a key that another holder of the name key has bound to
    other weights meanwhile, or updated."""
    made = f"updated {key} to {other.key.revision} with"
    if other.key == key:
        made = f"bound {key} to"
    return BindingError(
        f"another holder of the name key has {made} other weights, {other.ref.pin.hex()[:16]}",
        hint="let one process alone update the name; or serve these weights anew with `update`, if "
        "they are to come after those",
    )


def not_the_owner(name: str, what: str) -> BindingError:
    """Return the error for a source without the key of a name's owner."""
    return BindingError(
        f"{name} belongs to another name key: only its holders may {what}",
        hint="give this process the owner's key file (`name_key`), or use another name",
    )


def lends_of_none(key: ModelKey) -> BindingError:
    """Return the error for a lender key's state of a revision that the owner has not bound."""
    return BindingError(
        f"a lender key lends states of what the name's owner has bound, and not {key}",
        hint="serve these weights with the owner's key (`name_key`)",
    )


def bound_to_others(binding: Binding, ref: ManifestRef, *, own: bool) -> BindingError:
    """Return the error for other weights than a key is bound to."""
    hint = UPDATE_HINT if own else "register other weights under another name or `revision`"
    if not binding.sources:
        hint += "; or wait: its last source has gone, and a name is free some minutes later"
    return BindingError(
        f"{binding.key} is bound to {binding.ref.pin.hex()[:16]}, not {ref.pin.hex()[:16]}",
        hint=hint,
    )
