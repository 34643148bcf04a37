"""Checks that a name means what its owner says, for pulls that name his key: neither a coordinator
nor a peer is believed.

They could still answer with what the owner has said before. So the newest date that this user has
seen of a name is kept in a file of its own, and nothing older is taken.
"""

from __future__ import annotations

import functools
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, NoReturn

from blake3 import blake3

from mx import config
from mx.core.revisions import MAIN
from mx.core.vouching import END_US, decode, family
from mx.errors import ConfigError, ManifestError
from mx.log import event
from mx.publickey import is_signed
from mx.storage import folder_index
from mx.wire.client import LocatedModel
from mx.wire.locate import LocateRequest

log = logging.getLogger(__name__)


class _OwnerStatement(NamedTuple):
    """What an owner has said of a name, and when."""

    issued_us: int
    identity: str = ""
    packaging: str = ""


def check(where: LocateRequest, found: LocatedModel) -> None:
    """Check an answer to a pull with `owners`. Blocks.

    Args:
        where: What was asked for.
        found: The answer.

    Raises:
        ManifestError: No owner has signed it for this name and variant, or an older one was seen.
        ConfigError: What was seen of the name can't be read.
        NotAllowedError: Others may have written that.
    """
    name, _, pin = where.name.partition("@")
    key, asked = found.model, where.revision or MAIN

    def wrong(why: str, hint: str = "") -> NoReturn:
        by = f"the source at {where.peer}" if where.peer else "the coordinator"
        raise ManifestError(
            f"{by} answers {where.name} with {key}@{found.ref.pin.hex()}, {why}",
            hint=hint or "it is broken or lies, or `owner` is another's key: ask its owner",
        )

    if not found.vouch:
        wrong(
            "of which its owner says nothing",
            "serve it with this release, by a coordinator of this release, and with its owner's "
            "key (`name_key`); or name its pin in place of `owner`",
        )
    vouch = decode(found.vouch, key, is_signed)
    other = (key.name, key.variant) != (name, where.variant or key.variant)
    if vouch is None or other or not (pin or family(key.revision) == family(asked)):
        wrong("which has no valid signature of its owner for that")
    owner = next((o for o in where.owners if vouch.is_by(o.data, name, is_signed)), None)
    if owner is None:
        wrong("which the owner that was asked for has not signed")
    if not vouch.covers(found.ref):
        same = vouch.identity == found.ref.identity
        wrong("but its owner has signed other " + ("files" if same else "weights"))
    if pin or where.revision or where.allow_older:
        return
    folder = config.state_folder()
    parts = (owner.data, name.encode(), b"\0", key.variant.encode())
    file = "owner-" + blake3(b"".join(parts)).hexdigest()
    said = _OwnerStatement(vouch.issued_us, vouch.identity.hex(), vouch.packaging.hex())
    newest = _remembered(folder, file, said)
    # Processes that begin to serve at once date the same at different times.
    same = newest.identity == said.identity and said.packaging in ("", newest.packaging)
    if newest.issued_us > said.issued_us and not same:
        wrong(
            f"which its owner has published at {_shown(said.issued_us)}: this user has seen what "
            f"he has published at {_shown(newest.issued_us)}",
            f"wait for that; if the later time is wrong, remove {folder / file}",
        )


def _shown(issued_us: int) -> str:
    seconds = min(issued_us, END_US) / 1e6
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _remembered(folder: Path, name: str, said: _OwnerStatement) -> _OwnerStatement:
    """Return the newest of what a file remembers and `said`, which it remembers from now on."""
    kept = _read(folder, name)
    if kept >= said:
        return kept
    try:
        fd = folder_index.opened(folder, make=True)
        try:
            with folder_index.locked(fd, name):
                kept = max(_read(folder, name), said)  # another process may have been faster
                folder_index.write(fd, name, ",".join(map(str, kept)).encode())
        finally:
            os.close(fd)
    except OSError as error:  # what was seen before is known, and this is right
        _say_forgotten(f"{folder} can't be written: {error.strerror}")
    return kept


def _read(folder: Path, name: str) -> _OwnerStatement:
    try:
        fd = folder_index.opened(folder, make=False)
        try:
            issued_us, identity, packaging = folder_index.read(fd, name, 150).decode().split(",")
        finally:
            os.close(fd)
        return _OwnerStatement(int(issued_us), identity, packaging)
    except FileNotFoundError:
        return _OwnerStatement(0)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"what was seen of a name can't be read: {folder / name}: {error}",
            hint="remove the file, if you believe the coordinator for once",
        ) from error


@functools.cache
def _say_forgotten(why: str) -> None:
    event(
        log,
        "owner.forgotten",
        level=logging.WARNING,
        text=f"{why}: how new a name was is not remembered, and a later pull may take an older one",
    )
