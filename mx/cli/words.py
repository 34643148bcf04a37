"""Errors of the library in the words of the command line.

The library names its own arguments and settings, in backquotes: `wait_s`, `peer=HOST:PORT`. Here
they become what is typed: --wait, --from peer=HOST:PORT.
"""

from __future__ import annotations

import functools
import re

from mx import config

_QUOTED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
_ARGUMENTS = (
    "allow_older cache checkpoint device files_only follow hold json model only out pinned python "
    "revision transport update variant verify weights"
)
_OTHERS = {
    "attach": "--no-attach",
    "companions": "--main",
    "fallback": "--from auto",
    "path": "--from disk",
    "peer": "--from peer",
    "resume": "--no-resume",
    "slices": "--slice",
    "source": "--from",
}


@functools.cache
def _flags() -> dict[str, str]:
    found = {name: f"--{name.replace('_', '-')}" for name in _ARGUMENTS.split()}
    found |= {name: about.flag for name, about in config.descriptions().items() if about.verbs}
    return found | _OTHERS


def in_flags(text: str) -> str:
    """Return `text` with each argument and setting that it names as the flag that sets it.

    Args:
        text: A message or hint of an `MxError`.

    Returns:
        The text. What is quoted and is neither argument nor setting stays as it is.
    """
    return _QUOTED.sub(_flag, text)


def _flag(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    flag = _flags().get(name)
    if flag is None:
        return match[0]
    if value is None or value in ("True", "False"):
        return flag
    return f"{flag}={value}" if flag.startswith("--from") else f"{flag} {value}"
