"""Sockets that readers connect to over the network, and those that prove addresses; and which
connections a source keeps that have not presented a secret yet, where more come than it holds.

Each address has a share for connections that have sent nothing, and one for those that have begun.
So many connections from one address take no place of another's, and those that say nothing take
none of those that do.
"""

from __future__ import annotations

import errno
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mx.contexts import Undo
from mx.errors import LocalError
from mx.transport import ExposeOptions, TlsFiles
from mx_transports.toolkit import proof

#: Ports that are tried where one is free for connections, and taken for datagrams.
_PORT_TRIES = 16


class Listeners(NamedTuple):
    """The sockets that the readers of an exposure connect to. The exposure closes them.

    Attributes:
        sockets: The sockets that accept connections.
        fields: The fields by which tickets name them, as JSON has them: `dial.open_streams` passes
            them to the reader's function that connects.
        provers: The sockets for challenges (`proof`), where this process may have to prove an
            address.
        tls: The files for TLS connections; None for plain ones.
    """

    sockets: Sequence[socket.socket]
    fields: Mapping[str, object]
    provers: Sequence[socket.socket] = ()
    tls: TlsFiles | None = None

    def close(self) -> None:
        """Close all sockets."""
        for sock in (*self.sockets, *self.provers):
            sock.close()


#: A way to listen: `listen` here, `unix.listen`. Raises LocalError or ConfigError.
Listen = Callable[[ExposeOptions], Listeners]


def listen(options: ExposeOptions) -> Listeners:
    """Listen on each host of the options, on the first of their ports that is free there.

    Args:
        options: The options. With files for TLS, connections are encrypted.

    Returns:
        The sockets. Tickets have `addresses`, as `dial.network` reads them.

    Raises:
        LocalError: A host is not this machine's, or none of the ports is free there.
        ConfigError: A TLS file can't be used.
    """
    if options.tls is not None:
        from mx_transports.toolkit.tls import tls_context

        tls_context(options.tls, server=True)
    found: list[tuple[socket.socket, socket.socket]] = []
    for host in options.hosts:
        try:
            found.append(_listen(host, options.ports))
        except OSError as error:
            for sock, prover in found:
                sock.close()
                prover.close()
            if error.errno == errno.EADDRINUSE and options.ports:
                raise LocalError(
                    f"none of the data ports {options.ports[0]}-{options.ports[-1]} is free on "
                    f"{host}",
                    hint="give more with `data_ports`: each model that is served takes one, new "
                    "weights one more while they take the old ones' place",
                ) from error
            raise LocalError(
                f"can't listen on {host} for data: {error.strerror or error}",
                hint="give an address of this machine's own",
            ) from error
    named = (sock.getsockname()[:2] for sock, _ in found)
    # Without a host: at the one that the reader dials for control.
    addresses = dict.fromkeys(("" if options.at_peer else host, port) for host, port in named)
    fields = {"addresses": [list(address) for address in addresses]}
    return Listeners(
        [sock for sock, _ in found], fields, [prover for _, prover in found], options.tls
    )


def _listen(host: str, ports: Sequence[int]) -> tuple[socket.socket, socket.socket]:
    """Return a socket for connections and one for challenges, at one port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = list(ports) or [0] * _PORT_TRIES
    for port in tries[:-1]:
        try:
            return _listen_at(host, port, family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_at(host, tries[-1], family)


def _listen_at(host: str, port: int, family: int) -> tuple[socket.socket, socket.socket]:
    sock = socket.create_server((host, port), family=family, backlog=256)
    with Undo(sock.close):
        return sock, proof.listen(sock)


@dataclass
class UnprovedConnection:
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
    of_network = family in (socket.AF_INET, socket.AF_INET6)
    return socket.inet_pton(family, address[0])[:8] if of_network else b""


def dispensable(unproved: Collection[UnprovedConnection]) -> UnprovedConnection:
    """Return the connection to drop for another one: the oldest of the share that has most.

    Args:
        unproved: The connections; in each share the oldest comes first.
    """
    shares = Counter((each.host, each.begun) for each in unproved)
    return max(unproved, key=lambda each: shares[each.host, each.begun])
