"""The page's certificates beyond this machine: both ends show one, and new files are taken up."""

from __future__ import annotations

import logging
import math
import ssl
import time

from mx.errors import MxError
from mx.log import event
from mx.transport import TlsFiles
from mx.wire.address import WILDCARDS
from mx.wire.tls import check_server_files

log = logging.getLogger(__name__)

#: Files that could not be used are tried again after this: a certificate may not be valid yet.
AGAIN_S = 10.0


class Certificates:
    """A TLS context for browsers with certificates of the same authority."""

    def __init__(self, files: TlsFiles, host: str) -> None:
        """
        Args:
            files: The certificate, its key, the authority.
            host: Where the server listens; a wildcard for all addresses of this machine.

        Raises:
            ConfigError: A file cannot be read, or is not PEM.
            NotAllowedError: No browser would accept the certificate.
        """
        self._files = files
        self._host = "" if host in WILDCARDS else host
        self._state = files.state()
        self._until_s = math.inf  # until when they are not looked at again, unless they change
        self._refused: object = None  # what was said last of files that could not be used
        self.context = self._read()
        self.context.sni_callback = self._on_handshake  # called with and without a server's name
        self._newest = self.context
        #: The hosts that the certificate names.
        self.names = check_server_files(files, self._host).hosts

    def _read(self) -> ssl.SSLContext:
        check_server_files(self._files, self._host)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._files.authority)
        context.load_cert_chain(self._files.certificate, self._files.key)
        return context

    def _on_handshake(
        self, browser: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        del name, context
        state, now_s = self._files.state(), time.monotonic()
        if state != self._state or now_s >= self._until_s:
            self._state, self._until_s = state, math.inf
            try:
                self._newest, self._refused = self._read(), None
            except MxError as error:  # the old ones stay: files may be replaced one by one
                self._until_s = now_s + AGAIN_S
                refused, self._refused = self._refused, (state, error.message)
                if self._refused != refused:
                    event(log, "web.certificates", level=logging.WARNING, text=error.message)
        if self._newest is not self.context:
            browser.context = self._newest
