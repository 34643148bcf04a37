"""The `tcp` transport: several connections, bytes received straight into their destination.

Works between any two processes that can route to each other. Each connection has a thread; the
next request goes out before the current response has ended, so that the source never waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from mx.core.topology import Place
from mx.transport import (
    ExposedRegion,
    ExposeOptions,
    Exposure,
    Grant,
    Medium,
    Path,
    Session,
    Unavailable,
    Viable,
)
from mx_transports.toolkit.reach import one_network

__all__ = ["TcpTransport"]

#: Estimates for planning: what two cores of a server do over loopback, and what several streams
#: do over a fast network, if its interfaces do not set a lower limit.
LOOPBACK_GB_PER_S = 2.0
GB_PER_S = 3.0


class TcpTransport:
    """See `mx.transport.Transport`."""

    name = "tcp"

    def probe(self) -> Viable | Unavailable:
        return Viable("sockets")

    def reach(self, here: Place, there: Place) -> Path | None:
        """Return a path between any two places with addresses; those that have none but of loopback
        are reached on their own machine only."""
        local = one_network(here, there)
        if here.device != "cpu" or there.device != "cpu" or local is None:
            return None
        if local:
            return Path(self.name, LOOPBACK_GB_PER_S, detail="loopback")
        return Path(self.name, GB_PER_S, medium=Medium.NETWORK)

    def expose(self, regions: Sequence[ExposedRegion], options: ExposeOptions) -> Exposure:
        """Make regions readable.

        Raises:
            LocalError: A host can't be listened on, or a GPU's memory can't be copied.
            ConfigError: A TLS file can't be used.
        """
        from mx_transports.tcp.exposure import TcpExposure

        return TcpExposure(regions, options)

    def open(self, grant: Grant) -> Session:
        """Connect to an exposure.

        Raises:
            SourceError: The source can't be reached, or does not let us in.
            ConfigError: A TLS file can't be used.
        """
        from mx_transports.tcp.session import TcpSession
        from mx_transports.tcp.wire import MAGIC
        from mx_transports.toolkit import dial

        return TcpSession(grant, dial.open_streams(MAGIC, grant))
