"""Certificates that are replaced by ones that are not valid yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mx.operations.web.server import _context, _say_refused
from mx.transport import TlsFiles
from mx.wire import https, reloading
from mx.wire.https import Certificates
from mx.wire.reloading import ServerFiles, client_files
from tests.support.certificates import Authority

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")

LATER_S = 3.0


def _serial(server: ssl.SSLContext, files: TlsFiles) -> str:
    """Return the serial number of the certificate that a server shows to a browser."""
    # Not `create_default_context`: Python 3.13's wants more of an authority than tests' ones have.
    dialling = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialling.load_verify_locations(files.authority)
    dialling.load_cert_chain(files.certificate, files.key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        dialling.wrap_bio(to_client, to_server, server_hostname="localhost"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    return str((sides[0].getpeercert() or {})["serialNumber"])


async def _until(found: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not found():
            await asyncio.sleep(0.05)


async def test_what_is_not_valid_yet_is_used_once_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "mx")
    monkeypatch.setattr(reloading, "AGAIN_S", 0.2)
    monkeypatch.setattr(reloading, "LOOK_S", 0.05)
    monkeypatch.setattr(https, "AGAIN_S", 0.2)
    authority = Authority(tmp_path, "ca")
    server, client, page, browser = map(authority.certificate, ("server", "client", "page", "b"))
    served, shown = ServerFiles(server, ""), _context(Certificates(page, "", _say_refused))
    first, serial = client_files(client)[0], _serial(shown, browser)
    for files in (server, client, page):
        authority.postpone(files, LATER_S)
    soon_s = time.monotonic() + LATER_S - 1.0  # certificates have whole seconds
    served.start()
    try:
        await _until(lambda: client_files(client)[0] != first)
        await _until(lambda: _serial(shown, browser) != serial)
        await _until(lambda: any("certificates.replaced" in m for m in caplog.messages))
    finally:
        await served.stop()
    assert time.monotonic() >= soon_s
    refused = [m for m in caplog.messages if "is not valid yet" in m]
    assert len(refused) == len(set(refused))  # each is said once
