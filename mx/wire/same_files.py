"""What the sources of this user on this host say of the files that they have read: a unix socket
for each process, in the folder that only the user may use.

A process that connects gets one JSON object, and the connection ends. Both sides have the kernel
say who the other is. `mx.engines.replica.same_files` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mx import forks, users
from mx.errors import MxError
from mx.wire.private import check_folder, default_folder, make_folder

#: (device, inode, size, mtime_ns, ctime_ns) of a file.
Stamp = tuple[int, int, int, int, int]

_PREFIX, _SUFFIX = "files-", ".sock"
_MAX_SOURCES = 256
#: How long one source may take to answer. On a busy host a second is not enough, and who misses an
#: answer reads the weights from the disk.
ANSWER_S = 5.0


@dataclass(frozen=True)
class ListedModel:
    """A model whose weights a source has read from files: `identity` in hexadecimal."""

    name: str
    revision: str
    identity: str
    files: frozenset[Stamp]


class FilesListing:
    """Lists the files that this process's sources have read; on the loop. `close` it."""

    def __init__(
        self, models: Callable[[], Sequence[ListedModel]], folder: Path | None = None
    ) -> None:
        """
        Args:
            models: Returns what is served at the moment.
            folder: Where the socket is to be; None for the user's folder.
        """
        self._models = models
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def start(self) -> None:
        """Listen. Idempotent.

        Raises:
            NotAllowedError: Others may use the folder, or it can't be made.
            OSError: There is no socket.
        """
        if self._server is not None:
            return
        name = f"{os.getpid()}-{secrets.token_hex(8)}"
        path = (self._folder or default_folder()) / f"{_PREFIX}{name}{_SUFFIX}"
        make_folder(path)
        _sweep(path.parent)
        unfinished = path.with_name(f".{name}")
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(str(unfinished))
            sock.listen(64)
            # Under this name it answers: who finds a socket that does not may remove it.
            unfinished.rename(path)
            self._server = await asyncio.start_unix_server(self._answer, sock=sock)
        except BaseException:
            sock.close()
            unfinished.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise
        self._path = path
        forks.own(sock)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            if users.is_own_peer(writer.get_extra_info("socket")):
                models = [
                    [each.name, each.revision, each.identity, sorted(each.files)]
                    for each in self._models()
                ]
                writer.write(json.dumps({"version": 1, "models": models}).encode())
                await asyncio.wait_for(writer.drain(), ANSWER_S)
        writer.close()

    async def close(self) -> None:
        """Listen no more. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            await server.wait_closed()
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)


def sockets(folder: Path) -> Iterator[Path]:
    """Yield the sockets of this user's sources on this host."""
    try:
        check_folder(folder / f"{_PREFIX}{_SUFFIX}")
        with os.scandir(folder) as entries:
            names = [each.name for each in entries if each.name.startswith(_PREFIX)]
    except (MxError, OSError):
        return
    yield from filter(Path.is_socket, [folder / name for name in sorted(names)[:_MAX_SOURCES]])


def _sweep(folder: Path) -> None:
    """Remove the sockets of processes that were killed: nothing listens at them."""
    for path in sockets(folder):
        with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as sock:
            try:
                os.kill(int(path.name.removeprefix(_PREFIX).partition("-")[0]), 0)
            except ProcessLookupError:  # or it is a container's, which shares the folder
                sock.setblocking(False)
                if sock.connect_ex(str(path)) == errno.ECONNREFUSED:
                    path.unlink()
