"""Which hosts a router sends anything to. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from mx.errors import ConfigError

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedHosts:
    """A list of networks, addresses and names of hosts. It decides by what is written: no name is
    resolved, so that a name is allowed only by its name."""

    def __init__(self, entries: Iterable[str]) -> None:
        """
        Args:
            entries: Networks ("10.0.0.0/8"), addresses, and names ("replica-1.example", or
                "*.example" for all names that end so).

        Raises:
            ConfigError: An entry is empty, no text, has spaces, or is a malformed network.
        """
        self._networks: list[_Network] = []
        self._names: set[str] = set()
        for entry in entries:
            if not isinstance(entry, str) or not entry or any(map(str.isspace, entry)):
                raise _malformed(entry)
            try:
                self._networks.append(ipaddress.ip_network(entry.strip("[]"), strict=False))
            except ValueError:
                if "/" in entry or ":" in entry or "*" in entry.removeprefix("*."):
                    raise _malformed(entry) from None
                self._names.add(entry.lower().rstrip("."))

    def allows(self, host: str) -> bool:
        """Return True if this host, a name or an address, is on the list."""
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            name = host.lower().rstrip(".")
            ends = (name[at:] for at, each in enumerate(name) if each == ".")
            return name in self._names or any(f"*{end}" in self._names for end in ends)
        return any(address in network for network in self._networks)

    def allows_endpoint(self, endpoint: str) -> bool:
        """Return True if the host of a HOST:PORT is on the list, or there is none ("")."""
        return not endpoint or self.allows(endpoint.rpartition(":")[0])


def _malformed(entry: object) -> ConfigError:
    return ConfigError(
        f"`allow` has {entry!r}",
        hint='write hosts: "10.0.0.0/8", "10.0.0.7", "replica-1.example" or "*.example"',
    )
