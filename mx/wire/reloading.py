"""Certificates that are replaced while they are in use: servers and channels that read them again.

Running calls and streams go on; each new connection is made with the files that are there. New
files that can't be used, as while they are being replaced, are logged once, and those of before are
used further. They are tried again: a certificate may not be valid yet by the clock of this machine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from mx.errors import MxError
from mx.log import event
from mx.runtime import in_thread
from mx.tasks import end_tasks
from mx.transport import TlsFiles
from mx.wire.address import read_tls
from mx.wire.tls import check_client_files, check_server_files

log = logging.getLogger(__name__)

#: How often files are looked at.
LOOK_S = 1.0
#: Changed files are read once they have stayed the same for this long.
SETTLE_S = 0.2
#: Files that could not be used are tried again after this.
AGAIN_S = 10.0
_MOST_BYTES = 4 << 20
_MOST_KEPT = 16
#: The most channels of one `ReloadingChannel`.
_MOST_CHANNELS = 16

Pem = tuple[bytes, bytes, bytes]


async def contents_of(
    paths: Sequence[str], again: Callable[[], bool] = lambda: False
) -> AsyncIterator[list[bytes | None]]:
    """Yield the contents of files now, and again after each change of them; runs for ever.

    Args:
        paths: The files. The contents of one that can't be read are None.
        again: Returns True while the same contents are to be yielded again, each `AGAIN_S`.
    """
    seen: list[bytes | None] | None = None
    yielded_s = time.monotonic()
    while True:
        found = await in_thread(_read, paths)
        if again() and time.monotonic() >= yielded_s + AGAIN_S:
            seen = None
        while found != seen:
            seen = found
            await asyncio.sleep(SETTLE_S)
            found = await in_thread(_read, paths)
            if found == seen:  # else they are being written
                yield found
                yielded_s = time.monotonic()
        await asyncio.sleep(LOOK_S)


async def each_change(
    paths: Sequence[str],
    take: Callable[[list[bytes | None]], Awaitable[None]],
    again: Callable[[], bool] = lambda: False,
) -> None:
    """Call `take` with what `contents_of` yields of files; runs for ever.

    What fails unexpectedly, such as a thread that can't be started, is logged once and tried again:
    else the files of before would be used for as long as the process runs.
    """
    said = ""
    while True:
        try:
            async for found in contents_of(paths, again):
                await take(found)
                said = ""
        except Exception as error:  # noqa: BLE001 - see above
            text = f"{type(error).__name__}: {error}"
            if text != said:
                said = text
                event(log, "files.unread", level=logging.ERROR, files=", ".join(paths), text=text)
            await asyncio.sleep(LOOK_S)


def _read(paths: Sequence[str]) -> list[bytes | None]:
    found: list[bytes | None] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                found.append(file.read(_MOST_BYTES))
        except OSError:
            found.append(None)
    return found


class ServerFiles:
    """The files of a server. On the loop, from `start` to `stop`."""

    def __init__(
        self,
        tls: TlsFiles,
        host: str,
        on_replaced: Callable[[bytes, bytes], None] = lambda before, now: None,
    ) -> None:
        """
        Args:
            tls: The files.
            host: The host that clients dial; "" for any.
            on_replaced: Called with the authority's file of before and that of now: at once, and
                each time that new connections are made with other files.

        Raises:
            ConfigError: A file can't be read.
            NotAllowedError: No client would accept the certificate.
        """
        self._tls, self._host, self._on_replaced = tls, host, on_replaced
        self._pem = self._checked()
        self._shown = self._given = _shown(self._pem)
        #: The files that could not be used, if they are newer, and why.
        self._refused: tuple[object, str] | None = None
        self._task: asyncio.Task[None] | None = None
        on_replaced(self._pem[2], self._pem[2])

    def credentials(self) -> grpc.ServerCredentials:
        """Return the server's credentials, which require certificates of clients."""
        take: Any = self._take  # None for no change, which its type does not say
        return grpc.dynamic_ssl_server_credentials(self._shown, take, True)

    def start(self) -> None:
        paths = (self._tls.certificate, self._tls.key, self._tls.authority)
        following = each_change(paths, self._changed, lambda: self._refused is not None)
        self._task = asyncio.create_task(following, name="mx-certificates")

    async def stop(self) -> None:
        """End it. Idempotent."""
        await end_tasks(self._task)

    def _take(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the files if they have changed; gRPC calls this on its own threads, at each
        connection."""
        shown = self._shown  # which may change meanwhile
        if shown is self._given:
            return None
        self._given = shown
        return shown

    async def _changed(self, found: list[bytes | None]) -> None:
        if tuple(found) == self._pem:
            self._refused = None
            return
        before = self._pem
        try:
            self._pem = await in_thread(self._checked)
        except MxError as error:
            refused, self._refused = self._refused, (found, str(error))
            if self._refused != refused:
                _say_kept(self._tls, error)
            return
        self._refused = None
        self._shown = _shown(self._pem)
        event(log, "certificates.replaced", certificate=self._tls.certificate)
        self._on_replaced(before[2], self._pem[2])

    def _checked(self) -> Pem:
        check_server_files(self._tls, self._host)
        return read_tls(self._tls)


def _shown(pem: Pem) -> grpc.ServerCertificateConfiguration:
    certificate, key, authority = pem
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)


class _UsedFiles(NamedTuple):
    """The files of a client: their state as they were looked at last, the contents that are used,
    until when without another look, and why others are not."""

    state: object
    pem: Pem
    until_s: float = math.inf
    refused: str = ""


#: The files of clients that were used last.
_good: dict[TlsFiles, _UsedFiles] = {}


def client_files(tls: TlsFiles) -> Pem:
    """Return the PEM bytes of (certificate, key, authority) for new connections.

    Raises:
        ConfigError: A file can't be read, and could not before.
        NotAllowedError: No server would accept the certificate, and none was before that one would.
    """
    state, known, now_s = tls.state(), _good.get(tls), time.monotonic()
    if known is not None and known.state == state and now_s < known.until_s:
        return known.pem
    try:
        check_client_files(tls)
        used = _UsedFiles(state, read_tls(tls))
    except MxError as error:
        if known is None:
            raise
        used = _UsedFiles(state, known.pem, now_s + AGAIN_S, str(error))
        if (state, used.refused) != (known.state, known.refused):
            _say_kept(tls, error)
    _good.pop(tls, None)
    _good[tls] = used
    if len(_good) > _MOST_KEPT:
        del _good[next(iter(_good))]
    return used.pem


def _say_kept(tls: TlsFiles, error: MxError) -> None:
    event(
        log,
        "certificates.refused",
        level=logging.WARNING,
        certificate=tls.certificate,
        text=f"the earlier certificate stays in use: {error}",
    )


class ReloadingChannel:
    """As a grpc.aio channel whose new calls use the certificates of now. On the loop; `close` it.

    Calls that began with other certificates go on: their channels stay until `close`, of many the
    newest. (To be told when a call ends would keep the call, and its connection, until garbage is
    collected.) A channel without calls has no connection.
    """

    def __init__(self, tls: TlsFiles, make: Callable[[grpc.ChannelCredentials], Any]) -> None:
        """
        Args:
            tls: The files.
            make: Returns a channel with these credentials.

        Raises:
            MxError: As `client_files`.
        """
        self._tls, self._make = tls, make
        self._pem = client_files(tls)
        self._channels = [self._opened()]
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def files(self) -> Pem:
        """What new calls show."""
        return client_files(self._tls)

    def __getattr__(self, kind: str) -> Any:
        if kind not in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            raise AttributeError(kind)

        def method(*about: Any, **options: Any) -> Callable[..., Any]:
            def begin(*request: Any, **more: Any) -> Any:
                return getattr(self._current(), kind)(*about, **options)(*request, **more)

            return begin

        return method

    async def close(self, grace_s: float | None = None) -> None:
        """Close it, as grpc.aio does."""
        await asyncio.gather(*(each.close(grace_s) for each in self._channels), *self._closing)

    def _opened(self) -> Any:
        certificate, key, authority = self._pem
        return self._make(grpc.ssl_channel_credentials(authority, key, certificate))

    def _current(self) -> Any:
        pem = client_files(self._tls)
        if pem != self._pem:
            self._pem = pem
            self._channels.append(self._opened())
            if len(self._channels) > _MOST_CHANNELS:
                oldest = self._channels.pop(0)
                closing = asyncio.create_task(oldest.close(None), name="mx-channel-end")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
        return self._channels[-1]
