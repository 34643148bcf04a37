"""The trust file: whose artefacts this user's processes may use (`mx.artifacts.trust`), and whose
which names are:

    [[names]]
    name = "llama-*"
    key = "ed25519:9d61b19deffd5a60…"

A pull of such a name takes it only from that owner (`mx.fetching.owners`).
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from mx import users
from mx.errors import ConfigError
from mx.private import check_way
from mx.publickey import PublicKey, parse
from mx.text import shown

_MAX_BYTES = 1 << 20
_EXAMPLE = "docs/artifacts.md has an example of a trust file"


def owners(path: Path, name: str) -> tuple[PublicKey, ...]:
    """Return the keys that a trust file has for the owner of a name; () for none.

    Raises:
        ConfigError: As `load`.
    """
    return tuple(key for pattern, key in load(path)[1] if fnmatchcase(name, pattern))


def load(
    path: Path,
) -> tuple[dict[str, Any], list[tuple[str, PublicKey]], Callable[[str], NoReturn]]:
    """Read a trust file.

    Returns:
        What it has beside names; its patterns of names with the keys of their owners; and what
        raises the error of an entry that is wrong.

    Raises:
        ConfigError: It is missing, malformed, or other users could write to it or replace it.
    """

    def wrong(what: str) -> NoReturn:
        raise ConfigError(f"the trust file {path}: {what}", hint=_EXAMPLE)

    data = _read(path)
    if len(data) > _MAX_BYTES:
        wrong(f"it has more than {_MAX_BYTES} bytes")
    try:
        found = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # ValueError: a number of many digits, too
        wrong(str(error) or "it is nested too deeply")
    entries = found.pop("names", [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        wrong("owners of names are written as [[names]]")
    names = list[tuple[str, PublicKey]]()
    for entry in entries:
        name, key = entry.get("name"), entry.get("key")
        if entry.keys() != {"name", "key"} or not isinstance(name, str) or not name:
            wrong("[[names]] has a `name`, which may be a pattern, and the `key` of its owner")
        try:
            names.append((name, parse(str(key))))
        except ConfigError as error:
            wrong(f"the `key` of {shown(name)}: {error.message}")
    return found, names, wrong


def _read(path: Path) -> bytes:
    check_way(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise ConfigError(
            f"the trust file {path} can't be read: {error.strerror}", hint=_EXAMPLE
        ) from error
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"the trust file {path} is not a file", hint=_EXAMPLE)
        if not users.is_own(status.st_uid, fd, or_root=True) or status.st_mode & 0o022:
            raise ConfigError(
                f"other users may write to the trust file {path}",
                hint="it has to belong to this user or root, and no other user may write to it: "
                f"chmod go-w {path}",
            )
        return file.read(_MAX_BYTES + 1)
