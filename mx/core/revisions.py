"""The revisions that a name without one may mean: "main" and its updates, main.2, main.3 …"""

from __future__ import annotations

import re

MAIN = "main"

_UPDATE_OF_MAIN = re.compile(r"main\.[1-9][0-9]{0,8}", re.ASCII)


def is_main(revision: str) -> bool:
    """Return True if a name without a revision may mean this one: "main" or an update of it."""
    return revision == MAIN or _UPDATE_OF_MAIN.fullmatch(revision) is not None


def update_number(revision: str, root: str = MAIN) -> int:
    """Return N for the revision ROOT.N, and 0 for `root` itself and for other revisions."""
    number = revision.removeprefix(f"{root}.")
    return int(number) if number != revision and number.isascii() and number.isdigit() else 0
