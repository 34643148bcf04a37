"""Makes untrusted text safe to print: short, and without characters that control a terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

# C0 and C1 controls, DEL, marks that change the direction of text, line and paragraph separators;
# and halves of surrogate pairs, which cannot be encoded.
_TURNS = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_BREAKS = "\t-\r\x1c-\x1e\x85\u2028\u2029"
_CONTROL = re.compile(f"[\0-\x1f\x7f-\x9f\u2028\u2029{_TURNS}\ud800-\udfff]")
_BREAK = re.compile(f"[{_BREAKS}]+")
_CONTROL_BUT_LINES = re.compile(f"[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029{_TURNS}\ud800-\udfff]")


def has_control(text: str) -> bool:
    """Return True if the text has a character that `plain` removes or replaces."""
    return not text.isprintable() and _CONTROL.search(text) is not None


def can_be_encoded(text: str) -> bool:
    """Return False if the text has half a surrogate pair: it can't be written anywhere."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """Return text from elsewhere for an error message: quoted, escaped and shortened."""
    return repr(text if len(text) <= 120 else text[:117] + "...")


def plain(text: str) -> str:
    """Return the text on one line, without control characters.

    A run of line breaks and tabs becomes one space.
    """
    return _CONTROL.sub("", _BREAK.sub(" ", text)) if has_control(text) else text


def plain_lines(text: str) -> str:
    """Return the text without control characters other than line feeds and tabs."""
    return _CONTROL_BUT_LINES.sub("", text) if has_control(text) else text


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are: "a, b, c and 4 more"."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"
