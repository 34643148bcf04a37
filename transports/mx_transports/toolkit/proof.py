"""Lets a source prove that an address is its own, before a reader connects to it.

A ticket may name addresses other than the one that the control connection goes to: other
interfaces of the source, or a third party's. So the reader sends a CHALLENGE, a datagram to the
port that it would connect to: the key that names its grant, and a nonce. The source, which listens
for datagrams wherever it listens for connections, answers with an HMAC of the nonce under the
grant's secret, from that address. Only a process that receives what is sent there, and that made
the grant or got it from its source, can do that; a third party gets a few datagrams of 56 bytes, of
which the peer has chosen 16, and never a connection.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from mx.contexts import Undo
from mx.transport import Grant
from mx_transports.toolkit import framing

CHALLENGE = struct.Struct("!8s16s32s")
ANSWER = struct.Struct("!8s32s")
MAGIC = b"mxprov\0\1"
NONCE_BYTES = 32
#: A challenge that is not answered is sent again after this, then after twice as long, and so on.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5
#: Once one address is proved, others have so much longer.
OTHERS_S = 0.05
#: Addresses of one ticket that are challenged at most.
MOST_CHALLENGED = 16
#: Challenges that a source answers before it looks after its connections again.
MOST_AT_ONCE = 64

Address = tuple[str, int]


def _mac(secret: bytes, nonce: bytes, host: str) -> bytes:
    return hmac.digest(secret, MAGIC + nonce + host.encode(), hashlib.sha256)


def listen(listener: socket.socket) -> socket.socket:
    """Return a socket for the challenges to a listener's address.

    Raises:
        OSError: The port is taken for datagrams.
    """
    prover = socket.socket(listener.family, socket.SOCK_DGRAM)
    with Undo(prover.close):
        if listener.family == socket.AF_INET6:
            prover.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        prover.bind(listener.getsockname())
    return prover


def answer(prover: socket.socket, secret_of: Callable[[bytes], bytes | None]) -> None:
    """Answer the challenges that have arrived.

    Args:
        prover: The socket that `listen` returned, not blocking.
        secret_of: Returns the secret of a grant by its key; None if there is no such grant.
    """
    host = str(prover.getsockname()[0])
    for _ in range(MOST_AT_ONCE):
        try:
            data, sender = prover.recvfrom(CHALLENGE.size + 1)
        except OSError:
            return
        if len(data) != CHALLENGE.size:
            continue
        magic, key, nonce = CHALLENGE.unpack(data)
        secret = secret_of(key) if magic == MAGIC else None
        if secret is not None:
            with contextlib.suppress(OSError):
                prover.sendto(ANSWER.pack(MAGIC, _mac(secret, nonce, host)), sender)


def may_be_challenged(host: str) -> bool:
    """Return False for an address that no interface of another machine has."""
    address = ipaddress.ip_address(host)
    if address.version == 6 and address.ipv4_mapped is not None:
        return False
    return not (
        address.is_loopback
        or address.is_unspecified
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
    )


def proved(among: Sequence[Address], ticket: framing.Ticket, grant: Grant) -> list[Address]:
    """Return the addresses that answer a challenge as the ticket's source does, in their order.

    Blocks, up to the grant's stall timeout.

    Args:
        among: The addresses to challenge; at most MOST_CHALLENGED of them are.
        ticket: The ticket, with the secret that an answer has to prove.
        grant: The grant. With a rail, challenges leave from its near end.
    """
    found: set[Address] = set()
    cancelled = grant.cancelled
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        waiting: dict[Address, tuple[socket.socket, bytes]] = {}
        for address in [each for each in among if may_be_challenged(each[0])][:MOST_CHALLENGED]:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            sock = stack.enter_context(socket.socket(family, socket.SOCK_DGRAM))
            sock.setblocking(False)
            try:
                if grant.rail is not None:
                    sock.bind((grant.rail.local_address, 0))
                sock.connect(address)
            except OSError:  # no route
                continue
            cancelled.covers(sock)
            selector.register(sock, selectors.EVENT_READ, address)
            waiting[address] = sock, secrets.token_bytes(NONCE_BYTES)
        until_s, pause_s = time.monotonic() + grant.stall_timeout_s, FIRST_PAUSE_S
        while waiting and not cancelled.is_set and (now_s := time.monotonic()) < until_s:
            for sock, nonce in waiting.values():
                with contextlib.suppress(OSError):  # nothing listens there (yet)
                    sock.send(CHALLENGE.pack(MAGIC, ticket.key, nonce))
            again_s, pause_s = now_s + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
            while not cancelled.is_set and waiting:
                left_s = min(again_s, until_s) - time.monotonic()
                if left_s <= 0:
                    break
                for ready, _ in selector.select(left_s):
                    address = ready.data
                    sock, nonce = waiting[address]
                    if _holds(sock, _mac(ticket.secret, nonce, address[0])):
                        selector.unregister(sock)
                        del waiting[address]
                        found.add(address)
                        until_s = min(until_s, time.monotonic() + OTHERS_S)
    return [address for address in among if address in found]


def _holds(sock: socket.socket, expected: bytes) -> bool:
    try:
        data = sock.recv(ANSWER.size + 1)
    except OSError:  # refused, as ICMP says
        return False
    return hmac.compare_digest(data, ANSWER.pack(MAGIC, expected))
