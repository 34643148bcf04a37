"""Abstract unix sockets, between processes of one network namespace and one user.

The kernel says who is at the other end. A source admits processes of its own user
(`SocketExposure.admits`); a reader connects only to the process that the ticket names.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator

from mx import users
from mx.contexts import Undo
from mx.errors import LocalError, PeerProtocolError
from mx.transport import ExposeOptions, Grant
from mx_transports.toolkit import dial, framing, kernel
from mx_transports.toolkit.listeners import Listeners


def listen(options: ExposeOptions) -> Listeners:
    """Listen at a name that can not be guessed. No option matters.

    Returns:
        The socket. Tickets have the fields that `connect` reads.

    Raises:
        LocalError: No socket could be made.
    """
    del options
    name, pid = f"mx-{secrets.token_hex(16)}", os.getpid()
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with Undo(sock.close):
            sock.bind(b"\0" + name.encode())
            sock.listen(256)
    except OSError as error:
        raise LocalError(f"no unix socket for readers: {error.strerror}") from error
    return Listeners([sock], {"socket": name, "pid": pid, "start_ticks": kernel.start_ticks(pid)})


def named(ticket: framing.Ticket, peer: str) -> tuple[str, int]:
    """Return the socket's name and the process's pid that a ticket of `listen` has.

    Raises:
        PeerProtocolError: They are malformed.
    """
    name, pid = ticket.fields.get("socket"), ticket.fields.get("pid")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 100
        or not name.isascii()
        or type(pid) is not int
        or not 0 < pid < 1 << 31
    ):
        raise PeerProtocolError(f"{peer} handed out a ticket that can't be read", peer=peer)
    return name, pid


def connect(ticket: framing.Ticket, grant: Grant) -> Iterator[socket.socket]:
    """Connect to the process that a ticket of `listen` names, once for each socket yielded.

    Another process may have the pid by now. Readers of a process's memory by its pid hold a pidfd
    that was opened before; see `local`.

    Raises:
        SourceError: It can't be reached, or another process or user listens in its place.
    """
    name, pid = named(ticket, grant.peer)
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(grant.stall_timeout_s)
            sock.connect(b"\0" + name.encode())
            grant.cancelled.covers(sock)
            at, uid = users.peer_credentials(sock)
            if at != pid or not users.is_own(uid):
                raise PeerProtocolError(
                    f"{grant.peer}: process {at} of uid {uid} listens in its place",
                    peer=grant.peer,
                )
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                raise dial.translate(error, grant.peer, grant.peer) from error
            raise
        yield sock
