"""Where readers connect: sockets for connections, and for proofs that they are a source's own."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from mx.errors import LocalError
from mx.transport import ExposeOptions
from mx_transports.toolkit import proof

#: Ports that are tried where one is free for connections, and taken for datagrams.
_PORT_TRIES = 16


@dataclass(frozen=True)
class ListeningSocket:
    """A socket for connections and, where this process may have to prove that the address is its
    own, one for challenges (`proof`)."""

    sock: socket.socket
    prover: socket.socket | None = None

    @property
    def address(self) -> list[object]:
        """[host, port], as tickets have it."""
        return list(self.sock.getsockname()[:2])

    def close(self) -> None:
        """Close both sockets."""
        self.sock.close()
        if self.prover is not None:
            self.prover.close()


def listen(hosts: Sequence[str], ports: Sequence[int] = ()) -> list[ListeningSocket]:
    """Listen on each host, on the first of `ports` that is free there.

    Args:
        hosts: Addresses of this machine.
        ports: The ports to choose from; empty for any that is free.

    Returns:
        A listening socket for each host. The caller closes them.

    Raises:
        LocalError: A host is not this machine's, or none of the ports is free there.
    """
    listeners: list[ListeningSocket] = []
    for host in hosts:
        try:
            listeners.append(_listen(host, ports))
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno == errno.EADDRINUSE and ports:
                raise LocalError(
                    f"none of the data ports {ports[0]}-{ports[-1]} is free on {host}",
                    hint="give more with `data_ports`: each model that is served takes one, new "
                    "weights one more while they take the old ones' place",
                ) from error
            raise LocalError(
                f"can't listen on {host} for data: {error.strerror or error}",
                hint="give an address of this machine's own",
            ) from error
    return listeners


def addresses(listeners: Sequence[ListeningSocket], options: ExposeOptions) -> list[list[object]]:
    """Return what a ticket says of where to connect; see `dial.addresses`."""
    # Without a host: at the one that the reader dials for control.
    named = (listener.address for listener in listeners)
    found = dict.fromkeys(("" if options.at_peer else host, port) for host, port in named)
    return [list(address) for address in found]


def _listen(host: str, ports: Sequence[int]) -> ListeningSocket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = list(ports) or [0] * _PORT_TRIES
    for port in tries[:-1]:
        try:
            return _listen_at(host, port, family)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return _listen_at(host, tries[-1], family)


def _listen_at(host: str, port: int, family: int) -> ListeningSocket:
    sock = socket.create_server((host, port), family=family, backlog=256)
    try:
        return ListeningSocket(sock, proof.listen(sock))
    except BaseException:
        sock.close()
        raise
