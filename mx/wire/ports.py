"""Why a server can't listen somewhere, which gRPC does not say."""

from __future__ import annotations

import errno
import os
import socket

from mx import runtime
from mx.errors import LocalError
from mx.wire.address import join_address


def why_not_unix(path: str) -> str:
    """Return why no socket can be made at a path, as gRPC does not say; "" if one can be."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(path)
            os.unlink(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def require_free(host: str, port: int) -> None:
    """Raise LocalError if the address cannot be bound. A plain socket gives the reason; gRPC only
    says and logs that it failed."""
    where = join_address(host, port)
    try:
        found = await runtime.in_thread(
            socket.getaddrinfo,
            host,
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )
        for family, kind, protocol, _, endpoint in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(endpoint)
    except OSError as error:
        hint = "choose another port with `listen`, or port 0 for any free one"
        if error.errno == errno.EACCES:
            hint = "choose a port from 1024 on with `listen`: lower ones are for root"
        elif error.errno != errno.EADDRINUSE:
            hint = "give `listen` an address of this machine"
        what = f"port {port}: " if port else ""
        raise LocalError(
            f"cannot listen on {where}: {what}{error.strerror or error}", hint=hint
        ) from error
