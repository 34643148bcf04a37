"""Describes network interfaces: those that netlink lists, with their hardware from sysfs.

sysfs: Documentation/ABI/testing/sysfs-class-net and stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mx.core.topology import Nic
from mx.hardware import sysfs
from mx.hardware.netlink import Interface

_PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
#: How many GIDs of a port are read; the first ones of a RoCE port are of its own interface.
_GIDS = 4


class _Port(NamedTuple):
    """An RDMA port."""

    device: str
    port: int
    link_layer: str
    mbit_per_s: int


class NicHardware(NamedTuple):
    """Properties that never change while an interface exists; `physical`: it has a device."""

    physical: bool = False
    numa_node: int = -1
    pci_address: str = ""
    port: _Port | None = None


def read_nics(
    interfaces: Sequence[Interface],
    sys: Path = sysfs.SYS,
    known: dict[tuple[int, str], NicHardware] | None = None,
) -> tuple[Nic, ...]:
    """Return the interfaces, except loopback, that have an address or hardware.

    Args:
        interfaces: What `read_interfaces` returned; the result keeps their order.
        sys: Where sysfs is mounted.
        known: The caller's cache of hardware, by index and name; extended here.
    """
    known = {} if known is None else known
    new = [each for each in interfaces if (each.index, each.name) not in known]
    if new:
        ports = list(_ports(sys / "class/infiniband"))
        known |= {(each.index, each.name): _hardware(each, sys, ports) for each in new}
    found = []
    for interface in interfaces:
        hardware = known[interface.index, interface.name]
        if not interface.loopback and (interface.addresses or hardware.physical):
            found.append(_nic(interface, hardware, sys))
    return tuple(found)


def _folder(interface: Interface, sys: Path) -> Path | None:
    """Return the interface's folder in sysfs, if sysfs shows this network namespace."""
    path = sys / "class/net" / interface.name
    return path if sysfs.number(path / "ifindex", -1) == interface.index else None


def _nic(interface: Interface, hardware: NicHardware, sys: Path) -> Nic:
    path, port = _folder(interface, sys), hardware.port
    speed = -1 if path is None else sysfs.number(path / "speed", -1)
    if speed <= 0 and port is not None:
        speed = port.mbit_per_s  # IP over InfiniBand reports no speed
    return Nic(
        interface.name,
        interface.state,
        interface.addresses,
        max(speed, 0),
        interface.mtu,
        hardware.numa_node,
        hardware.pci_address,
        port.device if port else "",
        port.port if port else 0,
        port.link_layer if port else "",
    )


def _hardware(
    interface: Interface, sys: Path, ports: Sequence[tuple[_Port, frozenset[str]]]
) -> NicHardware:
    path = _folder(interface, sys)
    if path is None:
        return NicHardware()
    device = path / "device"
    # A port names its interface, except with InfiniBand: there both belong to the same device.
    port = next((port for port, names in ports if interface.name in names), None)
    if port is None:
        siblings = sysfs.names(device / "infiniband")
        number = sysfs.number(path / "dev_port", 0) + 1
        port = next(
            (port for port, names in ports
             if not names and port.device in siblings and port.port == number), None
        )  # fmt: skip
    address = _pci_address(device)
    numa_node = sysfs.number(sys / "bus/pci/devices" / address / "numa_node", -1) if address else -1
    return NicHardware(device.exists(), numa_node, address, port)


def _pci_address(device: Path) -> str:
    """Return the address of the nearest PCI device; virtio devices are below one."""
    try:
        parts = device.resolve(strict=True).parts
    except OSError:
        return ""
    return next((part for part in reversed(parts) if _PCI.fullmatch(part)), "")


def _ports(root: Path) -> Iterator[tuple[_Port, frozenset[str]]]:
    """Yield every RDMA port and the interfaces that it names."""
    for device in sysfs.names(root):
        ports = root / device / "ports"
        for number in sysfs.names(ports):
            path = ports / number
            if not number.isdigit():
                continue
            rate = _RATE.match(sysfs.text(path / "rate"))
            layer = sysfs.text(path / "link_layer")
            names = {sysfs.text(path / f"gid_attrs/ndevs/{i}") for i in range(_GIDS)} - {""}
            speed = int(float(rate[1]) * 1000) if rate else 0
            yield _Port(device, int(number), layer, speed), frozenset(names)
