"""What every TLS context of a process begins with."""

from __future__ import annotations

import ssl


class _Connected(ssl.SSLSocket):
    """A socket that is closed where its peer has gone before the handshake.

    `SSLContext.wrap_socket` asks for the peer first. If that has reset the connection, CPython
    drops the socket unclosed, with a ResourceWarning.
    """

    def getpeername(self) -> object:
        try:
            return super().getpeername()
        except OSError:
            if self.version() is None:
                self.close()
                raise ConnectionResetError("the peer has gone") from None
            raise


def new_context(*, server: bool) -> ssl.SSLContext:
    """Return a context without files, for sockets that are connected.

    Args:
        server: Whether the context is for the side that accepts.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = _Connected
    return context
