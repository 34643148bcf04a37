"""Which connections that have not presented a secret yet a source keeps, where more come than it
holds.

Each address has a share for connections that have sent nothing, and one for those that have begun.
So many connections from one address take no place of another's, and those that say nothing take
none of those that do.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Collection
from dataclasses import field
from typing import Any

from mx.records import record


@record
class Unproved:
    """A connection that has not presented a secret yet, from a host; `begun` is True once it has
    sent something."""

    sock: socket.socket
    host: bytes
    deadline: float
    handshaking: bool
    begun: bool = False
    received: bytearray = field(default_factory=bytearray)


def host_of(family: int, address: Any) -> bytes:
    """Return what the share of a connection goes by: its address; with IPv6 its network of 64 bits,
    as one machine may have all addresses in it. Sockets of other families are all of one host.

    Args:
        family: The socket's family.
        address: The address that `accept` returned.
    """
    if family not in (socket.AF_INET, socket.AF_INET6):
        return b""
    return socket.inet_pton(family, address[0])[:8]


def dispensable(unproved: Collection[Unproved]) -> Unproved:
    """Return the connection to drop for another one: the oldest of the share that has most.

    Args:
        unproved: The connections; in each share the oldest comes first.
    """
    shares = Counter((each.host, each.begun) for each in unproved)
    return max(unproved, key=lambda each: shares[each.host, each.begun])
