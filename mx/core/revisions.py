"""The revisions that a name without one may mean: "main" and its updates, main.2, main.3 …"""

from __future__ import annotations

import re

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
