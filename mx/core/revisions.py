"""The revisions that a name without one may mean: "main" and its updates, main.2, main.3 …"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from mx.core.types import ModelKey
from mx.core.variant import membership

MAIN = "main"

_UPDATE = re.compile(r".+\.(?:[2-9]|[1-9][0-9]+)", re.ASCII | re.DOTALL)
_UPDATE_OF_MAIN = re.compile(r"main\.[1-9][0-9]{0,8}", re.ASCII)


def is_main(revision: str) -> bool:
    """Return True if a name without a revision may mean this one: "main" or an update of it."""
    return revision == MAIN or _UPDATE_OF_MAIN.fullmatch(revision) is not None


def may_be_update(revision: str) -> bool:
    """Return True if a revision is called as an update is: ROOT.2, ROOT.3 …"""
    return _UPDATE.fullmatch(revision) is not None


def update_number(revision: str, root: str = MAIN) -> int:
    """Return N for the revision ROOT.N, and 0 for `root` itself and for other revisions."""
    number = revision.removeprefix(f"{root}.")
    return int(number) if number != revision and number.isascii() and number.isdigit() else 0


def main_revision(number: int) -> str:
    """Return the revision of "main" and its updates that has this number: "main" or "main.N"."""
    return f"{MAIN}.{number}" if number else MAIN


class RevisionChoice(NamedTuple):
    """Where weights belong: they are this revision's, or update it."""

    revision: str
    updates: bool


def placed(key: ModelKey, identity: bytes, bound: Mapping[ModelKey, bytes]) -> RevisionChoice:
    """Return where weights belong that are to be what their name means.

    A rank goes on to the newest revision of its bundle, also if it has missed some.

    Args:
        key: Of the weights; its revision is that of the first ones, or of an update of them.
        identity: Theirs.
        bound: The identity that each revision and variant of the name stands for.
    """
    root, bundle = MAIN if is_main(key.revision) else key.revision, membership(key.variant).bundle
    named, own = {}, {}
    for each, of in bound.items():
        number = update_number(each.revision, root)
        if (number or each.revision == root) and membership(each.variant).bundle == bundle:
            named[number] = each.revision
            if each.variant == key.variant:
                own[number] = of
    newest, last = max(named, default=0), max(own, default=-1)
    if last == newest:
        return RevisionChoice(named[last], own[last] != identity)
    if newest == 0:
        return RevisionChoice(key.revision, False)
    before = newest - 1 if root == MAIN else max((n for n in named if n < newest), default=0)
    return RevisionChoice(named.get(before, f"{root}.{before}" if before > 1 else root), True)
