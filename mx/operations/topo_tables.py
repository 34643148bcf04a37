"""What `mx topo` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from mx.cli import outcome
from mx.transport import Unavailable
from mx.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mx.api.survey import Reach, SourceReach, TopologyReport
    from mx.core.planner import Plan
    from mx.core.topology import Gpu, GpuPeer, Nic, Place
    from mx.discovery import Topology
    from mx.transport import Path

#: With more devices than this the matrix names transports by letters, to stay readable.
_WIDE = 4
_RELATIONS = {
    "switch": "PCIe switch",
    "bridge": "PCIe switches",
    "host": "host bridge",
    "node": "NUMA node",
    "system": "across nodes",
}


def show(report: TopologyReport, *, asked_for_sources: bool, model: str = "") -> None:
    """Print the report; `model` is the one whose sources were asked for, "" for all."""
    found = report.topology
    _host(found.place)
    _numa(found)
    _nics(found)
    _gpus(found)
    _transports(found)
    _matrix(report)
    if asked_for_sources:
        _sources(report, model)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _section(title: str, missing: str = "") -> None:
    outcome.write(f"\n{title}" + (f": {missing}" if missing else ""))


def _number(value: int) -> str:
    return "-" if value < 0 else str(value)


def _name(device: str, place: Place) -> str:
    """ "cpu", "gpu0": by the number that NVML and nvidia-smi give it."""
    uuid = device.removeprefix("cuda:")
    return next((f"gpu{gpu.index}" for gpu in place.gpus if gpu.uuid == uuid), device)


def _host(place: Place) -> None:
    table = _table("host", place.hostname)
    table.add_row("boot", place.boot_id or "not known")
    table.add_row("user", f"{place.uid}, in namespace {place.user_namespace}")
    namespaces = (
        ("network", place.net_namespace),
        ("process", place.pid_namespace),
        ("IPC", place.ipc_namespace),
    )
    table.add_row("namespaces", ", ".join(f"{kind} {number}" for kind, number in namespaces))
    if place.driver:
        table.add_row("NVIDIA driver", place.driver)
    outcome.show(table)


def _numa(found: Topology) -> None:
    _section("NUMA nodes", found.missing.get("numa_nodes", ""))
    if not found.place.numa_nodes:
        return
    table = _table("node", "cores", "memory", "distances", right=("memory",))
    for node in found.place.numa_nodes:
        distances = " ".join(str(each) for each in node.distances)
        memory = format_bytes(node.memory_nbytes)
        table.add_row(str(node.index), node.cpus or "none", memory, distances)
    outcome.show(table)


def _nics(found: Topology) -> None:
    missing = found.missing.get("nics", "")
    nics = found.place.nics
    _section("Network interfaces", missing or ("" if nics else "none but loopback"))
    if not nics:
        return
    table = _table("name", "state", "Gbit/s", "MTU", "NUMA", "RDMA", "addresses",
                   right=("Gbit/s", "MTU", "NUMA"))  # fmt: skip
    for nic in nics:
        speed = f"{nic.speed_mbit_per_s / 1000:g}" if nic.speed_mbit_per_s else "-"
        table.add_row(
            nic.name,
            nic.state,
            speed,
            str(nic.mtu),
            _number(nic.numa_node),
            _rdma(nic),
            "\n".join(nic.addresses) or "-",
        )
    outcome.show(table)


def _rdma(nic: Nic) -> str:
    if not nic.rdma_device:
        return "-"
    layer = "RoCE" if nic.link_layer == "Ethernet" else nic.link_layer
    return f"{nic.rdma_device}/{nic.rdma_port} {layer}"


def _gpus(found: Topology) -> None:
    gpus = found.place.gpus
    missing = found.missing.get("gpus", "")
    _section("GPUs", missing if gpus or not missing else f"none: {missing}")
    if not gpus:
        return
    table = _table("GPU", "name", "memory", "CC", "NUMA", "PCIe", "NVLink",
                   right=("memory", "NUMA"))  # fmt: skip
    identities = _table("GPU", "UUID", "PCI address")
    for gpu in gpus:
        table.add_row(
            f"gpu{gpu.index}",
            gpu.name or "-",
            format_bytes(gpu.memory_nbytes) if gpu.memory_nbytes else "-",
            gpu.compute_capability or "-",
            _number(gpu.numa_node),
            f"{gpu.pcie_generation}.0 x{gpu.pcie_width}" if gpu.pcie_generation else "-",
            f"{gpu.nvlinks} x {gpu.nvlink_gb_per_s:g} GB/s" if gpu.nvlinks else "-",
        )
        identities.add_row(f"gpu{gpu.index}", gpu.uuid, gpu.pci_address or "-")
    outcome.show(table)
    print()
    outcome.show(identities)
    if len(gpus) > 1:
        _section("Between GPUs")
        table = _table("from", "to", "NVLink lanes", "else by", "peer access")
        for near, far, peer in _pairs(gpus, found.place):
            nearest = _RELATIONS.get(peer.relation, peer.relation) or "-"
            lanes = (str(peer.nvlinks), "-") if peer.nvlinks else ("-", nearest)
            table.add_row(near, far, *lanes, _access(peer))
        outcome.show(table)


def _pairs(gpus: tuple[Gpu, ...], place: Place) -> Iterator[tuple[str, str, GpuPeer]]:
    """Yield (GPU, the GPUs that it is joined to in the same manner, how).

    Where all pairs are alike, that is one row of "each" and "each".
    """
    found: dict[tuple[str, tuple[object, ...]], tuple[list[str], GpuPeer]] = {}
    for gpu in gpus:
        for peer in gpu.peers:
            kind = (peer.nvlinks, peer.p2p_read, peer.p2p_write, peer.relation)
            names, _ = found.setdefault((f"gpu{gpu.index}", kind), ([], peer))
            names.append(_name(peer.uuid, place))
    if len({kind for _, kind in found}) == 1:
        yield "each", "each", next(iter(found.values()))[1]
        return
    for (near, _), (names, peer) in found.items():
        yield near, ", ".join(names), peer


def _access(peer: GpuPeer) -> str:
    paths = [name for name, has in (("read", peer.p2p_read), ("write", peer.p2p_write)) if has]
    return " and ".join(paths) or "no"


def _transports(found: Topology) -> None:
    _section("Transports")
    table = _table("name", "works", "how, or why not")
    for name, answer in found.transports.items():
        if isinstance(answer, Unavailable):
            table.add_row(name, "no", answer.reason)
        else:
            table.add_row(name, "yes", answer.detail)
    outcome.show(table)


def _matrix(report: TopologyReport) -> None:
    place, devices = report.topology.place, report.devices
    _section("From (columns) to (rows) on this host, in GB/s if nothing else is said")
    wide = len(devices) > _WIDE
    best = sorted({entry.paths[0].transport for entry in report.matrix if entry.paths})
    letters = {name: chr(ord("A") + i) for i, name in enumerate(best)} if wide else {}
    table = _table("", *(_name(device, place) for device in devices))
    cells = {(entry.target, entry.source): _cell(entry, letters) for entry in report.matrix}
    for target in devices:
        table.add_row(_name(target, place), *(cells[target, source] for source in devices))
    outcome.show(table)
    if wide:
        legend = ", ".join(f"{letter} {name}" for name, letter in letters.items())
        outcome.write(f"{legend}, = attach, ~ through host memory")


def _cell(entry: Reach, letters: dict[str, str]) -> str:
    """Return all paths, a line for those that look alike; with `letters` for names the best one
    alone, and shorter."""
    if letters:
        return _brief(entry.paths[0], letters) if entry.paths else "-"
    return "\n".join(dict.fromkeys(map(_in_words, entry.paths))) or "-"


def _brief(path: Path, letters: dict[str, str]) -> str:
    sign = "~" if path.staged else ""
    return f"{letters[path.transport]} {'=' if path.attach else f'{path.gb_per_s:.3g}{sign}'}"


def _in_words(path: Path) -> str:
    if path.attach:
        return f"{path.transport} attach"
    return f"{path.transport} {path.gb_per_s:.3g}" + (" staged" if path.staged else "")


def _sources(report: TopologyReport, model: str) -> None:
    none = f"the coordinator lists none of {model}" if model else "the coordinator lists none"
    _section("Sources", "" if report.sources else none)
    if not report.sources:
        return
    table = _table("source", "host", "model", "to", "path", "GB/s", "", right=("GB/s",))
    for source in report.sources:
        record = source.record
        for targets, rows in _by_target(source, report.topology.place):
            for i, row in enumerate(rows):
                first = (record.endpoint, record.place.hostname, str(record.model), targets)
                table.add_row(*(first if i == 0 else ("", "", "", "")), *row)
    outcome.show(table)


def _by_target(
    source: SourceReach, place: Place
) -> Iterator[tuple[str, tuple[tuple[str, str, str], ...]]]:
    """Yield (devices, the paths to them); devices with the same paths come together."""
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for device, plan in source.plans.items():
        groups.setdefault(_paths(plan), []).append(_name(device, place))
    for paths, devices in groups.items():
        yield ", ".join(devices), paths


def _paths(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """Return the paths that a pull would use; without any, why each transport can't."""
    if not plan.chosen:
        reasons: dict[str, list[str]] = {}
        for rejected in plan.rejected:
            reasons.setdefault(rejected.reason, []).append(rejected.transport)
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        return (("none", "-", why),)
    return tuple(
        (path.label, "attach" if path.attach else f"{path.gb_per_s:.3g}", path.detail)
        for path in plan.chosen
    )
