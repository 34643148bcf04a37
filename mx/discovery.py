"""What this process and machine are, read from /proc and the kernel: no library, no cost."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from mx.core.topology import Place
from mx.errors import ConfigError

_SIOCGIFFLAGS = 0x8913
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


def process_start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat: with the pid it names a process for good. 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name, in brackets, may hold spaces and brackets of its own.
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def here(device: str = "cpu", addresses: Sequence[str] = ()) -> Place:
    """This process's place."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return Place(
        boot_id=boot_id,
        hostname=socket.gethostname(),
        uid=os.getuid(),
        pid=os.getpid(),
        pid_start_ticks=process_start_ticks(os.getpid()),
        pid_namespace=_namespace("pid"),
        net_namespace=_namespace("net"),
        user_namespace=_namespace("user"),
        device=device,
        addresses=tuple(addresses),
    )


def interface_addresses() -> dict[str, str]:
    """The IPv4 address of each interface that is up, loopback left out."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # no address, or it has just gone
                flags = fcntl.ioctl(probe, _SIOCGIFFLAGS, request)
                if not struct.unpack("H", flags[16:18])[0] & _IFF_UP:
                    continue
                address = socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
                if not ipaddress.ip_address(address).is_loopback:
                    found[name] = address
    return found


def data_hosts(control_host: str, nics: Sequence[str] = ()) -> tuple[str, ...]:
    """Where data endpoints open: on the control address where that is loopback, else on every
    interface that is up, or on those of `nics`.

    Raises ConfigError for an interface that is not there.
    """
    if nics:
        addresses = interface_addresses()
        missing = [nic for nic in nics if nic not in addresses]
        if missing:
            raise ConfigError(
                f"no such interface with an address: {', '.join(missing)}",
                hint=f"there are: {', '.join(addresses) or 'none but loopback'}",
            )
        return tuple(addresses[nic] for nic in nics)
    if control_host == "localhost":
        return ("127.0.0.1",)
    try:
        address = ipaddress.ip_address(control_host.strip("[]"))
    except ValueError:
        return tuple(interface_addresses().values()) or ("127.0.0.1",)
    if address.is_loopback:
        return (str(address),)
    return tuple(interface_addresses().values()) or (str(address),)


def dialable_host(control_host: str) -> str:
    """The address that others should dial when this process listens on `control_host`."""
    if control_host.strip("[]") in ("0.0.0.0", "::", ""):
        return next(iter(interface_addresses().values()), "127.0.0.1")
    return control_host
