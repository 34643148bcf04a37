"""What a service manager is told: that a command serves, or ends (sd_notify(3)).

The manager names a datagram socket in NOTIFY_SOCKET. Without one nothing is sent.
"""

from __future__ import annotations

import contextlib
import socket

from mx import config
from mx.cli import outcome
from mx.text import plain

#: A manager that reads nothing never makes a command wait longer than this.
_TIMEOUT_S = 1.0


def hear(event: str, text: str) -> None:
    """Say that the command serves, or that it ends; see `mx.packs.Pack.listeners`."""
    if event == "ready":
        _send(f"READY=1\nSTATUS={plain(text)}")
    elif event == "stopping":
        _send("STOPPING=1")


def _send(state: str) -> None:
    where = config.notify_socket()
    if not where:
        return
    # A name that begins with @ is in the abstract namespace.
    address = f"\0{where[1:]}" if where.startswith("@") else where
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(_TIMEOUT_S)
            sock.sendto(state.encode(), address)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            outcome.say(f"the service manager at {where} (NOTIFY_SOCKET) is not told: {error}")
