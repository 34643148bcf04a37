"""What this process and machine are, as a `Place`: read from /proc, the kernel and, for a GPU's
place, NVML. What does not change is read once per process."""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mx.core.topology import Gpu, Nic, NumaNode, Place
from mx.errors import ConfigError
from mx.hardware import Topology, read_gpus, read_nics, read_numa_nodes
from mx.hardware.gpus import GpusFound
from mx.hardware.netlink import Interface, read_interfaces
from mx.hardware.nics import NicHardware
from mx.transport import Transport

log = logging.getLogger(__name__)

# A place travels with every request: bounds that only odd machines reach, well inside the codec's.
_MAX_NICS = 16
_MAX_ADDRESSES = 4

_nic_hardware: dict[tuple[int, str], NicHardware] = {}


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


@functools.cache
def _numa_nodes() -> tuple[NumaNode, ...]:
    return read_numa_nodes()


@functools.cache
def _gpus() -> GpusFound:
    return read_gpus()


def _interfaces() -> list[Interface]:
    try:
        return read_interfaces()
    except OSError as error:
        log.warning("the network interfaces are not known: %s", error)
        return []


def _is_ipv6(address: str) -> bool:
    return ":" in address


def _plain(interface: Interface) -> list[str]:
    """Its addresses without their networks."""
    return [address.partition("/")[0] for address in interface.addresses]


def here(
    device: str = "cpu", addresses: Sequence[str] | None = None, *, nics: Sequence[str] = ()
) -> Place:
    """This process's place, as it registers it: with the interfaces that have addresses, and of
    the GPUs that which `device` names ("cuda:UUID"; NVML is not touched for "cpu").

    `addresses` are those that its data endpoints listen on; without any being given, those that
    it can be dialled from: of every interface that is up, or of those named `nics`. Raises
    ConfigError for one of those that is not there.
    """
    found = _interfaces()
    registered = _registered(found)
    if addresses is None:
        chosen = _chosen(found, nics)
        if not nics:
            known_names = {nic.name for nic in registered}
            chosen = [each for each in chosen if each.name in known_names]
        addresses = [address for each in chosen for address in _plain(each)[:_MAX_ADDRESSES]]
    gpus: tuple[Gpu, ...] = ()
    driver = ""
    if device != "cpu":
        known = _gpus()
        gpus = tuple(gpu for gpu in known.gpus if f"cuda:{gpu.uuid}" == device)
        driver = known.driver
    return _place(device, addresses, registered, gpus, driver)


def topology(transports: Mapping[str, Transport], *, nics: Sequence[str] = ()) -> Topology:
    """This process's place with all that the machine has, and what each transport says of itself.

    Raises ConfigError as `here`.
    """
    missing = {}
    try:
        found = read_interfaces()
    except OSError as error:
        found, missing["nics"] = [], f"the kernel does not list its interfaces: {error}"
    addresses = [address for each in _chosen(found, nics) for address in _plain(each)]
    numa_nodes, gpus = _numa_nodes(), _gpus()
    if not numa_nodes:
        missing["numa_nodes"] = "the kernel does not list its NUMA nodes"
    if gpus.reason:
        missing["gpus"] = gpus.reason
    place = _place("cpu", addresses, read_nics(found, known=_nic_hardware), gpus.gpus, gpus.driver)
    return Topology(place, missing, {name: each.probe() for name, each in transports.items()})


def _place(
    device: str,
    addresses: Sequence[str],
    nics: tuple[Nic, ...],
    gpus: tuple[Gpu, ...],
    driver: str,
) -> Place:
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
        ipc_namespace=_namespace("ipc"),
        device=device,
        addresses=tuple(addresses),
        driver=driver,
        nics=nics,
        gpus=gpus,
        numa_nodes=_numa_nodes(),
    )


def _registered(interfaces: Iterable[Interface]) -> tuple[Nic, ...]:
    """Interfaces that have addresses; where those are too many, the ones with hardware first."""
    nics = [nic for nic in read_nics(list(interfaces), known=_nic_hardware) if nic.addresses]
    if len(nics) > _MAX_NICS:
        nics = sorted(nics, key=lambda nic: not nic.pci_address)[:_MAX_NICS]
    return tuple(replace(nic, addresses=nic.addresses[:_MAX_ADDRESSES]) for nic in nics)


def _chosen(interfaces: Iterable[Interface], nics: Sequence[str]) -> list[Interface]:
    """Those that are up and have addresses, or of these the ones named, in that order. Raises
    ConfigError."""
    usable = {each.name: each for each in interfaces if each.usable and each.addresses}
    missing = [nic for nic in nics if nic not in usable]
    if missing:
        raise ConfigError(
            f"no such interface that is up and has an address: {', '.join(missing)}",
            hint=f"there are: {', '.join(usable) or 'none but loopback'}",
        )
    return [usable[nic] for nic in nics] if nics else list(usable.values())


def _of_family(interfaces: Iterable[Interface], *families: bool) -> list[str]:
    """Of each interface its first address of the families (is it IPv6?) in the order given; of
    one that has none of them, its first."""
    found = []
    for plain in map(_plain, interfaces):
        best = [next((a for a in plain if _is_ipv6(a) is family), None) for family in families]
        found += [address for address in best if address is not None] or plain[:1]
    return found


def interface_addresses() -> dict[str, str]:
    """The address of each interface that is up, IPv4 if it has one; loopback is left out."""
    chosen = _chosen(_interfaces(), ())
    return {each.name: _of_family([each], False)[0] for each in chosen}


def data_hosts(control_host: str, nics: Sequence[str] = ()) -> tuple[str, ...]:
    """Where data endpoints open: on the control address where that is loopback, else on every
    interface that is up, or on those of `nics`.

    They speak the control address's IP version ("::" is both), which readers are known to have;
    the other one on interfaces that have no address of it. Raises ConfigError for an interface
    that is not there.
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
    """The address that others should dial when this process listens on `control_host`."""
    if control_host.strip("[]") in ("0.0.0.0", "::", ""):
        return next(iter(interface_addresses().values()), "127.0.0.1")
    return control_host
