"""TLS with a peer that has gone before the handshake."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
from collections.abc import Iterator

import pytest

from mx.tls import new_context


@pytest.fixture
def abandoned() -> Iterator[socket.socket]:
    """A connection that its other end has reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with near:
            yield near


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_its_socket_is_closed(abandoned: socket.socket, server: bool, at_once: bool) -> None:
    context = new_context(server=server)
    if not server:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(OSError):
        context.wrap_socket(abandoned, server_side=server, do_handshake_on_connect=at_once)
    assert abandoned.fileno() == -1
    gc.collect()  # one that was left open warns now
