"""Which hosts a process may name as its own, and which ones a router uses."""

from __future__ import annotations

import pytest

from mx.coordinator.callers import may_name
from mx.errors import ConfigError
from mx.fleet.allowed import AllowedHosts


@pytest.mark.parametrize(
    ("host", "address", "may"),
    [
        ("10.0.0.7", "10.0.0.7", True),
        ("10.0.0.8", "10.0.0.7", False),
        ("replica.example", "10.0.0.7", False),
        ("[fd00::0:1]", "fd00::1", True),
        ("127.0.0.1", "10.0.0.7", False),
        ("10.0.0.1", "127.0.0.1", True),  # this machine's
        ("10.0.0.2", "127.0.0.1", False),
        ("10.0.0.1", "", True),  # over a unix socket
        ("10.0.0.1", "10.0.0.7", False),  # from elsewhere
        ("", "10.0.0.7", False),
    ],
)
def test_a_caller_names_its_own_hosts_alone(host: str, address: str, may: bool) -> None:
    assert may_name(host, address, {"10.0.0.1"}) is may


def test_allowed_hosts() -> None:
    hosts = AllowedHosts(["10.0.0.0/8", "192.0.2.1", "fd00::/8", "a.example", "*.pods.example"])
    for host in ("10.1.2.3", "192.0.2.1", "fd00::1", "[fd00::1]", "A.example.", "x.pods.example"):
        assert hosts.allows(host)
    for host in ("11.0.0.1", "192.0.2.2", "fe80::1", "b.example", "pods.example", "xpods.example"):
        assert not hosts.allows(host)
    assert hosts.allows_endpoint("10.0.0.1:8000") and hosts.allows_endpoint("")
    assert not hosts.allows_endpoint("[fe80::1]:8000")


@pytest.mark.parametrize(
    "entry",
    ["", "10.0.0.0/99", "host:80", "a*b", " 10.0.0.1", "10.0.0.1\n", "a b", 5, b"x", None, 1.5, []],
)
def test_a_malformed_entry_is_refused(entry: object) -> None:
    with pytest.raises(ConfigError) as error:
        AllowedHosts(["10.0.0.1", entry])  # type: ignore[list-item]
    assert "`allow`" in error.value.message and repr(entry) in error.value.message
