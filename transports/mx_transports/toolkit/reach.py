"""Whether processes at two places can connect, for `Transport.reach`: no IO, quick to import."""

from __future__ import annotations

import ipaddress

from mx.core.topology import Place


def only_loopback(place: Place) -> bool:
    """Return True if a place has no address that other machines reach."""
    return all(is_loopback(address) for address in place.addresses)


def is_loopback(address: str) -> bool:
    """Return True for an IP address of loopback, and for its name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def one_network(here: Place, there: Place) -> bool | None:
    """Return how sockets get from one place to another.

    Returns:
        True within one network namespace of one machine, False over the network, None if they
        can't: one place has addresses of loopback only.
    """
    if (here.boot_id, here.net_namespace) == (there.boot_id, there.net_namespace):
        return True
    return None if only_loopback(here) or only_loopback(there) else False


def same_user(here: Place, there: Place) -> bool:
    """Return True if two processes can pass descriptors to each other, and the kernel vouches for
    their user: one kernel, the same network, process and user namespaces, one uid."""
    if not here.boot_id or here.uid < 0 or here.same_host_key != there.same_host_key:
        return False
    return (here.uid, here.user_namespace) == (there.uid, there.user_namespace)
