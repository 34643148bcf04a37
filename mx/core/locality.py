"""The check of a place that a source declares. Pure.

A source declares its own place. A place on another machine only shapes estimates, which this
machine's interfaces bound. A place on this machine decides more: memory is attached, loopback is
dialled, and the source ranks first. So it is accepted only if the connection to the source's
control endpoint does not leave this machine.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from mx.core.topology import Place
from mx.core.types import SourceRecord


def own_addresses(here: Place) -> set[str]:
    """Return the IP addresses of this machine that `here` names, without loopback."""
    of_nics = (text.partition("/")[0] for nic in here.nics for text in nic.addresses)
    return {*of_nics, *here.addresses}


def is_this_machine(host: str, here: Place) -> bool:
    """Return True if the `host` of an endpoint is certainly the machine of `here`.

    Names are not resolved: only "localhost" and the machine's own hostname are known.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() in ("localhost", here.hostname.lower())
    return address.is_loopback or str(address) in own_addresses(here)


def with_verified_place(source: SourceRecord, here: Place) -> SourceRecord:
    """Return the record with a place that claims no more than `here` can verify.

    Args:
        source: A record from the coordinator or from the source itself.
        here: This process's place.

    Returns:
        `source`; its place is on another machine unless its endpoint is on this one.
    """
    place = source.place
    claims = (place.boot_id, place.net_namespace) == (here.boot_id, here.net_namespace)
    host = source.endpoint.rpartition(":")[0]
    if not claims or is_this_machine(host, here):
        return source
    elsewhere = replace(place, boot_id=f"not {here.boot_id}", pid_namespace=0, net_namespace=0)
    return replace(source, place=elsewhere)
