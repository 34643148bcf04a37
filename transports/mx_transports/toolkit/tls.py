"""TLS contexts for data connections: mutual, 1.3 only, against the users' own CA."""

from __future__ import annotations

import ssl

from mx.errors import ConfigError
from mx.transport import TlsFiles


def tls_context(files: TlsFiles, *, server: bool) -> ssl.SSLContext:
    """Return a context that shows `files.certificate` and requires one signed by `files.authority`.

    Names in certificates are not compared: data endpoints are addresses, and the CA is the
    users' own.

    Args:
        files: The PEM files.
        server: Whether it is for the side that accepts.

    Raises:
        ConfigError: A file is missing, or is not what it should be.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # Connections are never resumed.
    try:
        what = f"{files.certificate} with {files.key}"
        context.load_cert_chain(files.certificate, files.key)
        what = files.authority
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise ConfigError(
            f"TLS can't use {what}: {error.strerror or error}",
            hint="`tls_cert`, `tls_key` and `tls_ca` take PEM files",
        ) from error
    return context
