"""Says of a source behind address translation that others can't reach it where it says."""

from __future__ import annotations

import asyncio
import ipaddress
import logging

from mx.log import Throttle, event
from mx.wire.address import split_address

log = logging.getLogger(__name__)

#: How long a source may take to accept a connection: its registration is answered afterwards.
_DIAL_S = 1.0

#: A registration causes a connection to an address that its caller names: one per caller's address
#: in a while.
_dialled = Throttle()


async def warn_of_unreached(endpoint: str, address: str) -> None:
    """Log a warning if a source gives a private address that is not the one it calls from, and
    nothing answers there: it is behind address translation, and has not said where it is reached.

    Args:
        endpoint: The HOST:PORT that the source registers.
        address: The IP address that its call comes from, "" for none.
    """
    host, port = split_address(endpoint)
    try:
        ours, seen = ipaddress.ip_address(host), ipaddress.ip_address(address)
    except ValueError:  # a name, or a unix socket
        return
    if ours == seen or ours.is_loopback or not ours.is_private:
        return
    if _dialled.passes(address) is None:
        return
    try:
        async with asyncio.timeout(_DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        event(
            log,
            "source.unreached",
            level=logging.WARNING,
            endpoint=endpoint,
            address=address,
            text="it can't be reached where it says: if it is behind address translation, give it "
            "`advertise` (and `data_ports`), which name where others reach it",
        )
    else:
        writer.close()
