"""Errors of the library in the words of the command line.

The library names its own arguments and settings, in backquotes: `wait_s`, `peer=HOST:PORT`. Here
they become what is typed: --wait, --from peer=HOST:PORT.
"""

from __future__ import annotations

import re

from mx import config

_QUOTED = re.compile(r"`([a-z_]+)(?:=([^`]*))?`")
#: Those whose flag is not their name.
_FLAGS = {
    "attach": "--no-attach",
    "cache_memory": "--memory",
    "coordinator_listen": "--listen",
    "fallback": "--from auto",
    "path": "--from disk",
    "peer": "--from peer",
    "resume": "--no-resume",
    "slices": "--slice",
    "source": "--from",
    "wait_s": "--wait",
}
_ARGUMENTS = (
    "checkpoint",
    "device",
    "files_only",
    "hold",
    "model",
    "only",
    "out",
    "revision",
    "transport",
    "update",
    "variant",
    "verify",
)


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
    if name not in _FLAGS and name not in _ARGUMENTS and name not in config.setting_names():
        return match[0]
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is None or value in ("True", "False"):
        return flag
    return f"{flag}={value}" if flag.startswith("--from") else f"{flag} {value}"
