"""Which refusals have a line in the audit log: of many alike one in a while, and of each principal
so many, whatever models it names. The others are counted."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

from mx.log import Throttle

INTERVAL_S = 10.0
#: The most kinds of refusals of a principal, and the most principals, that are told apart within
#: `INTERVAL_S`. All others are as one.
MOST_KINDS, MOST_PRINCIPALS = 8, 256
#: What stands for the principals beyond these.
OTHERS = "others"


class Refusals:
    """Counts refusals. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, Throttle] = {}
        self._others = Throttle(INTERVAL_S, MOST_KINDS)

    def passes(
        self, principal: str, kind: tuple[str, ...], now_s: float | None = None
    ) -> int | None:
        """Return None for a refusal that has no line of its own, else how many alike had none.

        Args:
            principal: Who is refused.
            kind: The error, the right and the model.
            now_s: The time; None for now.
        """
        found, cause = self._of.get(principal), kind
        if found is None and len(self._of) < MOST_PRINCIPALS:
            found = self._of[principal] = Throttle(INTERVAL_S, MOST_KINDS)
        if found is None:
            found, cause = self._others, (*kind, principal)
        return found.passes(cause, now_s)

    def left_out(self, now_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Yield the fields of lines about refusals that had none. Call this now and then."""
        for principal, throttle in (*self._of.items(), (OTHERS, self._others)):
            for cause, count in throttle.left_out(now_s):
                yield {**_fields(principal, cause), "held_back": count}
            if principal in self._of and throttle.is_empty:
                del self._of[principal]


def _fields(principal: str, cause: Hashable) -> dict[str, str]:
    if not isinstance(cause, tuple):  # of kinds beyond `MOST_KINDS`
        return {"principal": principal}
    error, right, model, *who = cause
    return {"principal": (who or [principal])[0], "error": error, "right": right, "model": model}
