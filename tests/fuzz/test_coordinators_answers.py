"""Anything at all from what listens on a coordinator's port: a client refuses it, and lives."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.commands import environment
from tests.support.http2 import SETTINGS, frame, frames

pytestmark = pytest.mark.integration

#: Asks until its standard input ends. Prints whatever is not an error of mx.
CLIENT = """
import select, sys
from mx import api
from mx.errors import MxError
while not select.select([sys.stdin], [], [], 0)[0]:
    try:
        print(api.list_models(coordinator=sys.argv[1]), flush=True)
    except MxError:
        pass
"""
GOAWAY = 7
#: Valid, and ends a process with gRPC 1.84 or 1.85, which pyproject.toml refuses for this.
UNKNOWN_REASON = frame(GOAWAY, 0, 0, (1).to_bytes(4, "big") + (0xC2832AE7).to_bytes(4, "big"))

noise = st.binary(max_size=300) | st.lists(frames, max_size=8).map(b"".join)


def test_raw_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        host, port = server.getsockname()
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, f"{host}:{port}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        ) as client:
            try:

                @settings(max_examples=150)
                @example(UNKNOWN_REASON, True, False)
                @given(noise, st.booleans(), st.booleans())
                def attack(data: bytes, established: bool, hang_up: bool) -> None:
                    assert client.poll() is None
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        connection.settimeout(5)
                        connection.recv(4096)
                        if established:
                            connection.sendall(SETTINGS)
                            connection.recv(4096)
                        connection.sendall(data)
                        if hang_up:
                            connection.shutdown(socket.SHUT_WR)
                        connection.settimeout(0.05)
                        while connection.recv(4096):
                            pass

                attack()
                server.close()  # what it asks for now gets no answer
                out, err = client.communicate(b"\n", timeout=60)
                assert (client.returncode, out) == (0, b""), err.decode(errors="replace")
            finally:
                client.kill()
