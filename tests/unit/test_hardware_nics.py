"""Interfaces and NUMA nodes, from recorded trees of sysfs; netlink, from this machine's kernel."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx.core.topology import Nic, NumaNode
from mx.hardware import netlink, read_nics, read_numa_nodes
from mx.hardware.netlink import Interface
from mx.hardware.nics import NicHardware


def write(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def add_nic(
    sys_root: Path, name: str, index: int, *, pci: str = "", numa_node: int = -1, speed: int = -1
) -> Path:
    """/sys/class/net/NAME, with a PCI device behind it if `pci` says so."""
    net = sys_root / "class/net" / name
    write(net / "ifindex", index)
    write(net / "speed", speed)
    write(net / "dev_port", 0)
    if pci:
        device = sys_root / "devices/pci0000:00" / pci
        write(device / "numa_node", numa_node)
        (net / "device").symlink_to(device)
        by_address = sys_root / "bus/pci/devices" / pci
        by_address.parent.mkdir(parents=True, exist_ok=True)
        if not by_address.exists():
            by_address.symlink_to(device)
    return net


def add_port(
    sys_root: Path, device: str, port: int, layer: str, rate: str, *, of: str = "", pci: str = ""
) -> None:
    """/sys/class/infiniband/DEVICE/ports/PORT; RoCE's names its interface."""
    ports = sys_root / "class/infiniband" / device / "ports" / str(port)
    write(ports / "link_layer", layer)
    write(ports / "rate", rate)
    if of:
        write(ports / "gid_attrs/ndevs/0", of)
    if pci:
        (sys_root / "devices/pci0000:00" / pci / "infiniband" / device).mkdir(parents=True)


def up(index: int, name: str, *addresses: str, mtu: int = 1500) -> Interface:
    return Interface(index, name, "up", mtu, addresses=addresses)


def test_infiniband_roce_and_plain_interfaces(tmp_path: Path) -> None:
    add_nic(tmp_path, "ib0", 2, pci="0000:17:00.0", numa_node=0)
    add_port(tmp_path, "mlx5_0", 1, "InfiniBand", "400 Gb/sec (4X NDR)", pci="0000:17:00.0")
    add_nic(tmp_path, "enp23s0", 3, pci="0000:e3:00.0", numa_node=1, speed=100_000)
    add_port(tmp_path, "mlx5_1", 1, "Ethernet", "100 Gb/sec (4X EDR)", of="enp23s0",
             pci="0000:e3:00.0")  # fmt: skip
    add_nic(tmp_path, "eth0", 4, pci="0000:01:00.0", numa_node=0, speed=25_000)
    add_nic(tmp_path, "bond0", 5, speed=200_000)
    add_port(tmp_path, "mlx5_bond_0", 1, "Ethernet", "200 Gb/sec (4X HDR)", of="bond0")
    found = read_nics(
        [
            Interface(1, "lo", "unknown", 65536, True, ("127.0.0.1/8",)),
            up(2, "ib0", "10.0.0.1/24", mtu=4092),
            up(3, "enp23s0", "10.0.1.1/24", "fd00::1/64"),
            up(4, "eth0"),
            up(5, "bond0", "10.0.2.1/24"),
            up(6, "docker0"),
        ],
        tmp_path,
    )
    assert found == (
        Nic("ib0", "up", ("10.0.0.1/24",), 400_000, 4092, 0, "0000:17:00.0", "mlx5_0", 1,
            "InfiniBand"),
        Nic("enp23s0", "up", ("10.0.1.1/24", "fd00::1/64"), 100_000, 1500, 1, "0000:e3:00.0",
            "mlx5_1", 1, "Ethernet"),
        Nic("eth0", "up", (), 25_000, 1500, 0, "0000:01:00.0"),
        Nic("bond0", "up", ("10.0.2.1/24",), 200_000, 1500, -1, "", "mlx5_bond_0", 1, "Ethernet"),
    )  # fmt: skip


def test_two_ports_of_one_infiniband_device_are_distinguished(tmp_path: Path) -> None:
    for port in (1, 2):
        net = add_nic(tmp_path, f"ib{port - 1}", port + 1, pci="0000:17:00.0")
        write(net / "dev_port", port - 1)
    add_port(tmp_path, "mlx4_0", 1, "InfiniBand", "56 Gb/sec (4X FDR)", pci="0000:17:00.0")
    add_port(tmp_path, "mlx4_0", 2, "InfiniBand", "40 Gb/sec (4X QDR)")
    one, two = read_nics([up(2, "ib0"), up(3, "ib1")], tmp_path)
    assert (one.rdma_device, one.rdma_port, one.speed_mbit_per_s) == ("mlx4_0", 1, 56_000)
    assert (two.rdma_device, two.rdma_port, two.speed_mbit_per_s) == ("mlx4_0", 2, 40_000)


def test_virtio_hangs_on_a_pci_device(tmp_path: Path) -> None:
    net = add_nic(tmp_path, "eth0", 2)
    virtio = tmp_path / "devices/pci0000:00/0000:00:03.0/virtio2"
    virtio.mkdir(parents=True)
    (net / "device").symlink_to(virtio)
    assert read_nics([up(2, "eth0")], tmp_path)[0].pci_address == "0000:00:03.0"


def test_sysfs_of_another_network_namespace_is_not_believed(tmp_path: Path) -> None:
    add_nic(tmp_path, "eth0", 7, pci="0000:01:00.0", speed=25_000)
    assert read_nics([up(2, "eth0", "10.0.0.1/24")], tmp_path) == (
        Nic("eth0", "up", ("10.0.0.1/24",), 0, 1500),
    )


def test_hardware_is_read_once_and_speed_each_time(tmp_path: Path) -> None:
    net = add_nic(tmp_path, "eth0", 2, pci="0000:01:00.0", numa_node=1, speed=10_000)
    known: dict[tuple[int, str], NicHardware] = {}
    read_nics([up(2, "eth0")], tmp_path, known)
    write(net / "speed", 25_000)
    shutil.rmtree(tmp_path / "bus")
    (nic,) = read_nics([up(2, "eth0")], tmp_path, known)
    assert (nic.speed_mbit_per_s, nic.numa_node) == (25_000, 1)
    add_nic(tmp_path, "eth1", 3, pci="0000:02:00.0")
    assert [nic.name for nic in read_nics([up(3, "eth1")], tmp_path, known)] == ["eth1"]


def test_without_sysfs_there_are_addresses_still(tmp_path: Path) -> None:
    (nic,) = read_nics([up(2, "eth0", "10.0.0.1/24")], tmp_path / "nothing")
    assert (nic.addresses, nic.speed_mbit_per_s, nic.numa_node) == (("10.0.0.1/24",), 0, -1)


def test_numa_nodes(tmp_path: Path) -> None:
    root = tmp_path / "devices/system/node"
    for index, cpus, kilobytes in ((0, "0-15,32-47", 1024), (1, "16-31", 2048), (10, "", 512),
                                   (2, "", 0)):  # fmt: skip
        write(root / f"node{index}/cpulist", cpus)
        text = f"Node {index} MemTotal:       {kilobytes} kB\nNode {index} MemFree:  1 kB"
        write(root / f"node{index}/meminfo", text)
        write(root / f"node{index}/distance", "10 21 12")
    write(root / "online", "0-2,10")
    assert read_numa_nodes(tmp_path) == (
        NumaNode(0, "0-15,32-47", 1 << 20, (10, 21, 12)),
        NumaNode(1, "16-31", 1 << 21, (10, 21, 12)),
        NumaNode(10, "", 512 << 10, (10, 21, 12)),  # memory alone: a GPU's, say
    )
    assert read_numa_nodes(tmp_path / "nothing") == ()


def test_the_kernels_list_agrees_with_the_c_librarys() -> None:
    found = netlink.read_interfaces()
    assert {(each.index, each.name) for each in found} == set(socket.if_nameindex())
    for each in found:
        for address in each.addresses:
            assert not ipaddress.ip_interface(address).ip.is_link_local
    assert [each.name for each in found if each.loopback] == ["lo"]


# --- in a network namespace of our own


READ = """
import json
from mx import discovery
from mx.errors import ConfigError
from mx.hardware.netlink import read_interfaces
place = discovery.here()
try:
    discovery.here(nics=["mxt0", "mxt4"])
except ConfigError as error:
    refused = error.message
print(json.dumps({
    "refused": refused,
    "interfaces": {each.name: [each.state, each.mtu, each.addresses] for each in read_interfaces()},
    "nics": {nic.name: nic.addresses for nic in place.nics},
    "addresses": place.addresses,
    "v4": discovery.data_hosts("0.0.0.0"),
    "v6": discovery.data_hosts("fd13::1"),
    "both": discovery.data_hosts("::"),
    "dialable": discovery.dialable_host("0.0.0.0"),
    "by_name": discovery.interface_addresses(),
    "named": discovery.data_hosts("0.0.0.0", ["mxt2"]),
    "here": discovery.here(nics=["mxt2", "mxt0"]).addresses,
}))
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    name = f"mx-topo-{os.getpid()}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this container may not make namespaces: {error.stderr.strip()}")
    try:
        at = ("-n", name)
        ip(*at, "link", "set", "lo", "up")
        for near, far in (("mxt0", "mxt1"), ("mxt2", "mxt3"), ("mxt4", "mxt5")):
            ip(*at, "link", "add", near, "type", "veth", "peer", "name", far)
        for link in ("mxt0", "mxt1", "mxt2", "mxt3"):
            ip(*at, "link", "set", link, "up", "mtu", "9000")
        ip(*at, "addr", "add", "fd13::1/64", "dev", "mxt0", "nodad")
        ip(*at, "addr", "add", "10.213.9.1/24", "dev", "mxt0")
        ip(*at, "addr", "add", "10.213.9.9/24", "dev", "mxt0")
        ip(*at, "addr", "add", "fd13:0:0:1::1/64", "dev", "mxt2", "nodad")
        ip(*at, "addr", "add", "169.254.7.7/16", "dev", "mxt2")
        ip(*at, "addr", "add", "10.213.8.1/24", "dev", "mxt4")  # which is down
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.parametrize("enter", ["ip netns exec", "nsenter"])
def test_veth_interfaces_with_ipv4_and_ipv6(namespace: str, enter: str) -> None:
    prefix = ["ip", "netns", "exec", namespace]
    if enter == "nsenter":  # which leaves /sys as it was: the host's
        prefix = ["nsenter", f"--net=/run/netns/{namespace}"]
        if shutil.which("nsenter") is None:
            pytest.skip("there is no nsenter")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", READ],
        env={"PYTHONPATH": os.pathsep.join([str(Path(netlink.__file__).parents[2])])},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    found = json.loads(done.stdout)
    of_mxt0 = ["10.213.9.1/24", "10.213.9.9/24", "fd13::1/64"]
    assert found["interfaces"]["mxt0"] == ["up", 9000, of_mxt0]
    assert found["interfaces"]["mxt1"] == ["up", 9000, []]
    assert found["interfaces"]["mxt2"] == ["up", 9000, ["fd13:0:0:1::1/64"]]
    assert found["interfaces"]["mxt4"] == ["down", 1500, ["10.213.8.1/24"]]
    assert found["nics"].keys() == {"mxt0", "mxt2", "mxt4"}
    assert found["nics"]["mxt0"] == of_mxt0
    # What can be dialled is on interfaces that are up.
    every = [*(address.partition("/")[0] for address in of_mxt0), "fd13:0:0:1::1"]
    assert sorted(found["addresses"]) == sorted(every)
    assert sorted(found["here"]) == sorted(every)
    assert found["here"][0] == "fd13:0:0:1::1"  # in the order in which they were named
    assert found["refused"].startswith("no such interface that is up and has an address: mxt4")
    # One address of each interface, of the control address's IP version if it has one.
    assert set(found["v4"]) == {"10.213.9.1", "fd13:0:0:1::1"}
    assert set(found["v6"]) == {"fd13::1", "fd13:0:0:1::1"}
    assert set(found["both"]) == {"10.213.9.1", "fd13::1", "fd13:0:0:1::1"}
    assert found["named"] == ["fd13:0:0:1::1"]
    assert found["by_name"] == {"mxt0": "10.213.9.1", "mxt2": "fd13:0:0:1::1"}
    assert found["dialable"] in found["by_name"].values()
