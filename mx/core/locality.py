"""How much of a declared place is believed. Pure.

A place is its process's own word. What it says of another machine only shapes estimates, which
this machine's own interfaces bound. But that a source is on this very machine decides that memory
is attached, that loopback is dialled and that it ranks first: it is believed only where the
connection to its control endpoint does not leave the machine either.
"""

from __future__ import annotations

import ipaddress
from dataclasses import replace

from mx.core.topology import Place
from mx.core.types import SourceRecord


def own_addresses(here: Place) -> set[str]:
    """The IP addresses of this machine that a place tells of, without loopback."""
    of_nics = (text.partition("/")[0] for nic in here.nics for text in nic.addresses)
    return {*of_nics, *here.addresses}


def is_this_machine(host: str, here: Place) -> bool:
    """Return True if `host`, of an endpoint, can't be another machine than that of `here`.

    Names are not resolved: only "localhost" and the machine's own one are known.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower() in ("localhost", here.hostname.lower())
    return address.is_loopback or str(address) in own_addresses(here)


def with_verified_place(source: SourceRecord, here: Place) -> SourceRecord:
    """The record with a place that claims no more than is verified from `here`.

    Args:
        source: What was registered, or described by the source itself.
        here: This process's place.

    Returns:
        `source`, whose place is on another machine unless its endpoint is on this one.
    """
    place = source.place
    claims = (place.boot_id, place.net_namespace) == (here.boot_id, here.net_namespace)
    host = source.endpoint.rpartition(":")[0]
    if not claims or is_this_machine(host, here):
        return source
    elsewhere = replace(place, boot_id=f"not {here.boot_id}", pid_namespace=0, net_namespace=0)
    return replace(source, place=elsewhere)
