"""The audit log: a JSON line of the logger `mx.audit` for each decision about a principal.

Equal ones within `INTERVAL_S` are two lines: the first as it is made, and one with the number of
the others. Of each principal at one address so many kinds are told apart, and so many principals;
all others are as one, whatever models they name.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from mx.log import AUDIT, Throttle, event

audit = logging.getLogger(AUDIT)

INTERVAL_S = 10.0
#: The most kinds of a principal that are told apart within `INTERVAL_S`, and the most principals:
#: of refusals, which anybody can cause, and of what was granted.
MOST_KINDS, MOST_PRINCIPALS = 8, 256
MOST_GRANTED_KINDS, MOST_GRANTED_PRINCIPALS = 32, 1024
#: What stands for the principals beyond these.
OTHERS = "others"
#: The fields by which lines are equal, after those of who it was; each line has all of them.
_KIND = ("action", "model", "revision", "pin", "result", "error")
#: What texts of callers are cut to.
_MOST_CHARACTERS = 200


class AuditLog:
    """The audit log of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._granted = _Lines(MOST_GRANTED_KINDS, MOST_GRANTED_PRINCIPALS)
        self._refused = _Lines(MOST_KINDS, MOST_PRINCIPALS)

    def write(
        self,
        principal: str,
        address: str,
        action: str,
        result: str,
        now_s: float | None = None,
        **about: Any,
    ) -> None:
        """Write the line of a decision, unless an equal one was written within `INTERVAL_S`.

        Args:
            principal: Whom it is about; "" for this process.
            address: The address of his connection.
            action: What was asked for.
            result: "granted" or what was done, "refused", or what has changed.
            now_s: The time; None for now.
            about: The model, revision, pin and error (`_KIND`), and what the line says besides.
        """
        about |= {"action": action, "result": result}
        texts = {key: str(value)[:_MOST_CHARACTERS] for key, value in about.items()}
        who, kind = (principal, address), tuple(texts.get(key, "") for key in _KIND)
        lines = self._refused if result == "refused" else self._granted
        # What this process itself does is rare, and never the same.
        held_back = lines.passes(who, kind, now_s) if principal else 0
        if held_back is not None:
            _write(_fields(who, kind) | texts, held_back + 1)

    def flush(self, now_s: float | None = None) -> None:
        """Write what was left out in the intervals that have ended. Call this now and then."""
        for lines in (self._refused, self._granted):
            for fields, count in lines.left_out(now_s):
                _write(fields, count)


#: The most names that are told of when a state is not believed.
_MOST_FORGED = 256


def write_forged(names: Sequence[str], why: str) -> None:
    """Write a line for each name that a state has which coordinators have not written."""
    for name in names[:_MOST_FORGED]:
        about = dict.fromkeys(("principal", "address", "action", "model", "revision", "pin"), "")
        _write(about | {"action": "state", "model": name, "result": "forged", "text": why}, 1)


def _write(texts: dict[str, str], count: int) -> None:
    fields: dict[str, Any] = {key: text for key, text in texts.items() if text or key != "error"}
    if count > 1:
        fields["count"] = count
    event(audit, f"audit.{texts['result'] or OTHERS}", **fields)


class _Lines:
    """Counts decisions by who they are about, and by kind."""

    def __init__(self, most_kinds: int, most_principals: int) -> None:
        self._most_kinds, self._most_principals = most_kinds, most_principals
        self._of: dict[tuple[str, str], Throttle] = {}
        self._others = Throttle(INTERVAL_S, most_kinds)

    def passes(
        self, who: tuple[str, str], kind: tuple[str, ...], now_s: float | None
    ) -> int | None:
        """Return None for one that has no line of its own, else how many alike had none."""
        found, cause = self._of.get(who), kind
        if found is None and len(self._of) < self._most_principals:
            found = self._of[who] = Throttle(INTERVAL_S, self._most_kinds)
        if found is None:
            found, cause = self._others, (*kind, *who)
        return found.passes(cause, now_s)

    def left_out(self, now_s: float | None) -> Iterator[tuple[dict[str, str], int]]:
        """Yield the fields of lines about those that had none, and their number."""
        for who, throttle in (*self._of.items(), ((OTHERS, ""), self._others)):
            for cause, count in throttle.left_out(now_s):
                yield _fields(who, cause), count
            if who in self._of and throttle.is_empty:
                del self._of[who]


def _fields(who: tuple[str, str], cause: Hashable) -> dict[str, str]:
    kind = cause if isinstance(cause, tuple) else ("",) * len(_KIND)  # beyond the most kinds
    texts = (*(kind[len(_KIND) :] or who), *kind[: len(_KIND)])
    return dict(zip(("principal", "address", *_KIND), texts, strict=True))
