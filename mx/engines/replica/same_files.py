"""Asks the sources of this user on this host which files they have read: the other end of
`mx.wire.same_files`."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Collection
from pathlib import Path

from mx import users
from mx.core.json_bounds import check_json
from mx.wire.private import default_folder
from mx.wire.same_files import ANSWER_S, ListedModel, Stamp, sockets

_MAX_ANSWER_BYTES = 4 << 20
#: How long all sources may take to answer.
_ALL_S = 10.0


def sources_of(files: Collection[Stamp], folder: Path | None = None) -> list[ListedModel]:
    """Return the models that sources of this user on this host have read from just these files.

    Args:
        files: The stamps of all files.
        folder: Where the sources' sockets are; None for the user's folder.
    """
    folder = folder or default_folder()
    wanted = frozenset(files)
    found: list[ListedModel] = []
    until_s = time.monotonic() + _ALL_S
    for path in sockets(folder):
        if time.monotonic() >= until_s:
            break
        found += [each for each in _asked(path) if each.files == wanted and wanted]
    return found


def _asked(path: Path) -> list[ListedModel]:
    """Return what the process at a socket lists; nothing if it is not this user's."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(ANSWER_S)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:  # its process has ended
            with contextlib.suppress(OSError):
                path.unlink()
            return []
        except OSError:
            return []
        if not users.is_own_peer(sock):
            return []
        try:
            return _read(_received(sock))
        except (OSError, ValueError, TypeError, RecursionError):
            return []


def _received(sock: socket.socket) -> bytes:
    data = bytearray()
    until_s = time.monotonic() + ANSWER_S
    while part := sock.recv(1 << 16):
        data += part
        if len(data) > _MAX_ANSWER_BYTES or time.monotonic() > until_s:
            raise ValueError("the list is too long")
    return bytes(data)


def _read(data: bytes) -> list[ListedModel]:
    check_json(data)
    found = json.loads(data)
    if not isinstance(found, dict) or found.get("version") != 1:
        return []
    listed = []
    for name, revision, identity, files in found["models"]:
        stamps = frozenset(stamp_of(each) for each in files)
        if all(isinstance(each, str) for each in (name, revision, identity)):
            bytes.fromhex(identity)
            listed.append(ListedModel(name, revision, identity, stamps))
    return listed


def stamp_of(numbers: object) -> Stamp:
    """Return the stamp that JSON has as a list of five integers. Raises ValueError."""
    if (
        not isinstance(numbers, list)
        or len(numbers) != 5
        or any(type(each) is not int for each in numbers)
    ):
        raise ValueError("a stamp is five integers")
    device, inode, nbytes, mtime_ns, ctime_ns = numbers
    return device, inode, nbytes, mtime_ns, ctime_ns
