"""Lists the network interfaces of this process's network namespace, through netlink.

A client of rtnetlink's two dumps, RTM_GETLINK and RTM_GETADDR (rtnetlink(7)). The constants are
those of linux/netlink.h, rtnetlink.h, if_link.h and if_addr.h. A socket belongs to the namespace of
the process, while the mount of sysfs decides which namespace that shows.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_TIMEOUT_S = 2.0
_TRIES = 3
_RECEIVE_BYTES = 1 << 17  # the kernel fills at most 32 KiB at a time

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_LINK = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix, flags, scope, index
_ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type

_NLM_F_REQUEST, _NLM_F_DUMP, _NLM_F_DUMP_INTR = 0x1, 0x300, 0x10
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_RTM_NEWLINK, _RTM_GETLINK, _RTM_NEWADDR, _RTM_GETADDR = 16, 18, 20, 22
_IFF_LOOPBACK = 0x8
_IFLA_IFNAME, _IFLA_MTU, _IFLA_OPERSTATE = 3, 4, 16
_IFA_ADDRESS, _IFA_LOCAL, _IFA_FLAGS = 1, 2, 8
# An IPv6 address that is temporary (the same bit means "secondary" for IPv4, where it does not
# matter), that failed or has not passed the check for duplicates, or that is deprecated.
_IFA_F_TEMPORARY = 0x01
_IFA_F_UNUSABLE = 0x08 | 0x20 | 0x40

#: The states of RFC 2863, as sysfs spells them.
_STATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `addresses` are in CIDR form, IPv4 first, without link-local and
    unusable ones."""

    index: int
    name: str
    state: str
    mtu: int
    loopback: bool = False
    addresses: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """True if the interface may carry traffic; tunnels report the state "unknown"."""
        return self.state in ("up", "unknown") and not self.loopback


def read_interfaces() -> list[Interface]:
    """Return every interface, by index. Raises OSError if the kernel does not answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.bind((0, 0))
        links = list(_links(_dump(sock, _RTM_GETLINK)))
        addresses: dict[int, list[str]] = {}
        for index, address in _addresses(_dump(sock, _RTM_GETADDR)):
            addresses.setdefault(index, []).append(address)
    return [
        Interface(
            index, name, state, mtu, loopback, tuple(sorted(addresses.get(index, ()), key=_is_ipv6))
        )
        for index, name, state, mtu, loopback in sorted(links)
    ]


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _dump(sock: socket.socket, request: int) -> list[tuple[int, memoryview]]:
    """Return (type, payload) of each message of a dump, repeated if it changed meanwhile."""
    for attempt in range(1, _TRIES + 1):
        # rtgenmsg, padded: all address families.
        message = _HEADER.pack(_HEADER.size + 4, request, _NLM_F_REQUEST | _NLM_F_DUMP, attempt, 0)
        sock.send(message + bytes(4))
        found: list[tuple[int, memoryview]] = []
        if not _receive(sock, attempt, found):
            return found
    return found


def _receive(sock: socket.socket, sequence: int, found: list[tuple[int, memoryview]]) -> bool:
    """Collect one answer; return True if the kernel marks it as inconsistent."""
    interrupted = False
    while True:
        view = memoryview(sock.recv(_RECEIVE_BYTES))
        while len(view) >= _HEADER.size:
            length, kind, flags, number, _ = _HEADER.unpack_from(view)
            if not _HEADER.size <= length <= len(view):
                raise OSError("netlink: a message is cut off")
            body = view[_HEADER.size : length]
            view = view[_aligned(length) :]
            if number != sequence:
                continue
            interrupted |= bool(flags & _NLM_F_DUMP_INTR)
            if kind == _NLMSG_DONE:
                return interrupted
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise OSError(code, f"netlink: {os.strerror(code)}")
            found.append((kind, body))


def _aligned(nbytes: int) -> int:
    return (nbytes + 3) & ~3


def _printable(name: str) -> str:
    """Return the name without control characters, since places are shown on terminals."""
    return "".join(each if each.isprintable() else "?" for each in name)


def _attributes(view: memoryview) -> Iterator[tuple[int, memoryview]]:
    while len(view) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(view)
        if not _ATTRIBUTE.size <= length <= len(view):
            return
        yield kind, view[_ATTRIBUTE.size : length]
        view = view[_aligned(length) :]


def _links(messages: list[tuple[int, memoryview]]) -> Iterator[tuple[int, str, str, int, bool]]:
    for kind, body in messages:
        if kind != _RTM_NEWLINK:
            continue
        _, _, index, flags, _ = _LINK.unpack_from(body)
        name, state, mtu = "", "", 0
        for attribute, value in _attributes(body[_LINK.size :]):
            if attribute == _IFLA_IFNAME:
                name = _printable(bytes(value).rstrip(b"\0").decode(errors="replace"))
            elif attribute == _IFLA_OPERSTATE and value[0] < len(_STATES):
                state = _STATES[value[0]]
            elif attribute == _IFLA_MTU:
                mtu = struct.unpack("=I", value)[0]
        yield index, name, state, mtu, bool(flags & _IFF_LOOPBACK)


def _addresses(messages: list[tuple[int, memoryview]]) -> Iterator[tuple[int, str]]:
    for kind, body in messages:
        if kind != _RTM_NEWADDR:
            continue
        family, prefix, flags, _, index = _ADDRESS.unpack_from(body)
        if family not in (socket.AF_INET, socket.AF_INET6):
            continue
        found = dict(_attributes(body[_ADDRESS.size :]))
        # On a point-to-point link "address" is that of the other end.
        raw = found.get(_IFA_LOCAL, found.get(_IFA_ADDRESS))
        if raw is None:
            continue
        if _IFA_FLAGS in found:
            flags = struct.unpack("=I", found[_IFA_FLAGS])[0]
        address = ipaddress.ip_address(bytes(raw))
        temporary = family == socket.AF_INET6 and flags & _IFA_F_TEMPORARY
        if not (temporary or flags & _IFA_F_UNUSABLE or address.is_link_local):
            yield index, f"{address}/{prefix}"
