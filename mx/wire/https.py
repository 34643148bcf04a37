"""The certificates of servers of HTTPS: both ends show one, and new files are taken up."""

from __future__ import annotations

import math
import ssl
import time
from collections.abc import Callable

from mx.errors import MxError
from mx.tls import new_context
from mx.transport import TlsFiles
from mx.wire.address import WILDCARDS
from mx.wire.tls import check_server_files

#: Files that could not be used are tried again after this: a certificate may not be valid yet.
AGAIN_S = 10.0


class Certificates:
    """TLS contexts for clients with certificates of the same authority."""

    def __init__(self, files: TlsFiles, host: str, on_refused: Callable[[str], None]) -> None:
        """
        Args:
            files: The certificate, its key, the authority.
            host: Where clients dial; a wildcard, or "", for all addresses of this machine.
            on_refused: Called with why new files can't be used; those of before still are.

        Raises:
            ConfigError: A file cannot be read, or is not PEM.
            NotAllowedError: No client would accept the certificate.
        """
        self._files = files
        self._host = "" if host in WILDCARDS else host
        self._on_refused = on_refused
        self._state = files.state()
        self._until_s = math.inf  # until when they are not looked at again, unless they change
        self._refused: object = None  # what was said last of files that could not be used
        self._newest = self._read()
        #: The hosts that the certificate names.
        self.names = check_server_files(files, self._host).hosts

    def _read(self) -> ssl.SSLContext:
        check_server_files(self._files, self._host)
        context = new_context(server=True)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self._files.authority)
        context.load_cert_chain(self._files.certificate, self._files.key)
        return context

    def newest(self) -> ssl.SSLContext:
        """Return the context for the files as they are now, or were when they last fitted
        together."""
        state, now_s = self._files.state(), time.monotonic()
        if state != self._state or now_s >= self._until_s:
            self._state, self._until_s = state, math.inf
            try:
                self._newest, self._refused = self._read(), None
            except (OSError, MxError) as error:  # files may be replaced one by one
                self._until_s = now_s + AGAIN_S
                why = error.message if isinstance(error, MxError) else str(error)
                refused, self._refused = self._refused, (state, why)
                if self._refused != refused:
                    self._on_refused(why)
        return self._newest
