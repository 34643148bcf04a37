"""The revision that NAME means for the ranks of each bundle. Pure.

It is the newest revision that has been complete, for all ranks; before one has been, the oldest. A
variant that is no rank of several has no entry here: `mx.core.meanings` takes the newest revision
of it that is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mx.core.revisions import is_main, update_number
from mx.core.variant import membership


@dataclass(frozen=True, slots=True)
class Meant:
    """The revision that NAME means for the ranks of a bundle; "" if none is bound any more."""

    name: str
    bundle: str
    revision: str


class NamedRevisions:
    """What names mean for bundles, and what has changed since it was last taken."""

    def __init__(self) -> None:
        self._meant: dict[tuple[str, str], str] = {}  # by name and bundle
        self._changed: list[Meant] = []

    def get(self, name: str, bundle: str) -> str:
        """Return the revision that NAME means for a bundle, "" for none."""
        return self._meant.get((name, bundle), "")

    def take(self) -> list[Meant]:
        """Return what has changed since the last call, in order."""
        changed, self._changed = self._changed, []
        return changed

    def decide(self, name: str, bundle: str, bound: Mapping[str, bool]) -> None:
        """Decide what NAME means for a bundle, and record a change.

        Args:
            name: The model's name.
            bundle: The bundle.
            bound: The revisions in which a rank of it is bound, True for those in which it has been
                complete.
        """
        if membership(bundle).alone:
            return
        mains = [revision for revision in bound if is_main(revision)]
        completed = [revision for revision in mains if bound[revision]]
        oldest = min(mains, key=update_number, default="")
        meant = max(completed, key=update_number, default=oldest)
        if meant == self.get(name, bundle):
            return
        if meant:
            self._meant[name, bundle] = meant
        else:
            del self._meant[name, bundle]
        self._changed.append(Meant(name, bundle, meant))
