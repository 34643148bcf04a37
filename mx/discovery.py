"""Describes this process and machine as a `Place`, from /proc, the kernel and, for a GPU's place,
NVML. Facts that do not change are read once per process."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mx import users
from mx.core.topology import Gpu, Nic, Place
from mx.errors import ConfigError
from mx.hardware import read_gpus, read_nics, read_numa_nodes
from mx.hardware.gpus import GpusFound
from mx.hardware.netlink import Interface, read_interfaces
from mx.hardware.nics import NicHardware
from mx.transport import Transport, Unavailable, Viable
from mx.users import BOOT_ID, namespace, process_start_ticks

log = logging.getLogger(__name__)

# A place travels with every request, so it is bounded, well within the codec's bounds. Only unusual
# machines reach these.
_MAX_NICS = 16
_MAX_ADDRESSES = 4


@dataclass(frozen=True, slots=True)
class Topology:
    """The machine as this process sees it.

    `place` has every interface, NUMA node and GPU. `missing` has the reasons why "nics",
    "numa_nodes" or "gpus" are unknown or incomplete. `transports` has, by name, whether each
    transport works here.
    """

    place: Place
    missing: Mapping[str, str] = field(default_factory=dict)
    transports: Mapping[str, Viable | Unavailable] = field(default_factory=dict)


_nic_hardware: dict[tuple[int, str], NicHardware] = {}


@functools.cache
def _gpus() -> GpusFound:
    return read_gpus()


def _interfaces() -> list[Interface]:
    try:
        return read_interfaces()
    except OSError as error:
        log.warning("cannot read the network interfaces: %s", error)
        return []


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _plain(interface: Interface) -> list[str]:
    """Return an interface's addresses without their networks."""
    return [address.partition("/")[0] for address in interface.addresses]


def here(
    device: str = "cpu", addresses: Sequence[str] | None = None, *, nics: Sequence[str] = ()
) -> Place:
    """Return this process's place as it registers it: with the interfaces that have addresses,
    and the GPU of `device`. NUMA nodes, which no path depends on, are left out.

    Args:
        device: "cpu" or "cuda:UUID". NVML is not used for "cpu".
        addresses: The addresses that data endpoints listen on; None for all usable ones: of every
            interface that is up, or of those in `nics`.
        nics: Names of interfaces.

    Raises:
        ConfigError: An interface of `nics` does not exist, is down, or has no address.
    """
    found = _interfaces()
    registered = _registered(found)
    if addresses is None:
        chosen = _chosen(found, nics)
        if not nics:
            known_names = {nic.name for nic in registered}
            chosen = [each for each in chosen if each.name in known_names]
        addresses = [address for each in chosen for address in _plain(each)[:_MAX_ADDRESSES]]
    place = _place("cpu", addresses, registered, (), "")
    return place if device == "cpu" else at_device(place, device)


def at_device(place: Place, device: str) -> Place:
    """Return this process's place for memory on a device: with its GPU.

    The first call for a GPU asks NVML, which takes some milliseconds.

    Args:
        place: The process's place.
        device: "cpu" or "cuda:UUID".
    """
    if device == "cpu":
        return replace(place, device=device)
    known = _gpus()
    gpus = tuple(gpu for gpu in known.gpus if f"cuda:{gpu.uuid}" == device)
    return replace(place, device=device, gpus=gpus, driver=known.driver)


def topology(transports: Mapping[str, Transport], *, nics: Sequence[str] = ()) -> Topology:
    """Return this process's place with all hardware of the machine, and each transport's probe.

    Raises:
        ConfigError: As `here`.
    """
    missing = {}
    try:
        found = read_interfaces()
    except OSError as error:
        found, missing["nics"] = [], f"the kernel does not list its interfaces: {error}"
    addresses = [address for each in _chosen(found, nics) for address in _plain(each)]
    numa_nodes, gpus = read_numa_nodes(), _gpus()
    if not numa_nodes:
        missing["numa_nodes"] = "the kernel does not list its NUMA nodes"
    if gpus.reason:
        missing["gpus"] = gpus.reason
    place = _place("cpu", addresses, read_nics(found, known=_nic_hardware), gpus.gpus, gpus.driver)
    place = replace(place, numa_nodes=numa_nodes)
    return Topology(place, missing, {name: each.probe() for name, each in transports.items()})


def _place(
    device: str,
    addresses: Sequence[str],
    nics: tuple[Nic, ...],
    gpus: tuple[Gpu, ...],
    driver: str,
) -> Place:
    return Place(
        boot_id=BOOT_ID,
        hostname=socket.gethostname(),
        uid=users.own(),
        pid=os.getpid(),
        pid_start_ticks=process_start_ticks(os.getpid()),
        pid_namespace=namespace("pid"),
        net_namespace=namespace("net"),
        user_namespace=namespace("user"),
        ipc_namespace=namespace("ipc"),
        device=device,
        addresses=tuple(addresses),
        driver=driver,
        nics=nics,
        gpus=gpus,
    )


def _registered(interfaces: Iterable[Interface]) -> tuple[Nic, ...]:
    """Return the interfaces that have addresses; of too many, those with hardware first."""
    nics = [nic for nic in read_nics(list(interfaces), known=_nic_hardware) if nic.addresses]
    if len(nics) > _MAX_NICS:
        nics = sorted(nics, key=lambda nic: not nic.pci_address)[:_MAX_NICS]
    return tuple(replace(nic, addresses=nic.addresses[:_MAX_ADDRESSES]) for nic in nics)


def _chosen(interfaces: Iterable[Interface], nics: Sequence[str]) -> list[Interface]:
    """Return the interfaces that are up and have addresses, or those of them that `nics` names, in
    that order. Raises ConfigError."""
    usable = {each.name: each for each in interfaces if each.usable and each.addresses}
    missing = [nic for nic in nics if nic not in usable]
    if missing:
        raise ConfigError(
            f"no such interface that is up and has an address: {', '.join(missing)}",
            hint=f"there are: {', '.join(usable) or 'none but loopback'}",
        )
    return [usable[nic] for nic in nics] if nics else list(usable.values())


def _of_family(interfaces: Iterable[Interface], *families: bool) -> list[str]:
    """Return each interface's first address of each family (True: IPv6), in the order given; of
    an interface without any of these, its first address."""
    found = []
    for plain in map(_plain, interfaces):
        best = [next((a for a in plain if _is_ipv6(a) is family), None) for family in families]
        found += [address for address in best if address is not None] or plain[:1]
    return found


def interface_addresses() -> dict[str, str]:
    """Return the address of each interface that is up, IPv4 if it has one; without loopback."""
    chosen = _chosen(_interfaces(), ())
    return {each.name: _of_family([each], False)[0] for each in chosen}


def data_hosts(control_host: str, nics: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the addresses on which data endpoints listen.

    That is the control address if it is loopback, else an address of every interface that is up,
    or of those in `nics`. They have the control address's IP version ("::" means both), which
    readers are known to have; interfaces without an address of it use the other one.

    Raises:
        ConfigError: An interface of `nics` does not exist, is down, or has no address.
    """
    host = "127.0.0.1" if control_host == "localhost" else control_host.strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None  # a name
    if address is not None and address.is_loopback and not nics:
        return (str(address),)
    if address is None or address.version == 4:
        families = [False]
    else:
        families = [False, True] if address.is_unspecified else [True]
    found = _of_family(_chosen(_interfaces(), nics), *families)
    if found:
        return tuple(found)
    return ("127.0.0.1",) if address is None or address.is_unspecified else (str(address),)


def dialable_host(control_host: str) -> str:
    """Return the address that others should dial when this process listens on `control_host`."""
    if control_host.strip("[]") in ("0.0.0.0", "::", ""):
        return next(iter(interface_addresses().values()), "127.0.0.1")
    return control_host
