"""Reads NUMA nodes from sysfs (Documentation/ABI/stable/sysfs-devices-node)."""

from __future__ import annotations

import re
from pathlib import Path

from mx.core.topology import NumaNode
from mx.hardware import sysfs

_NODE = re.compile(r"node(\d+)")
_MEMORY = re.compile(r"^Node \d+ MemTotal:\s+(\d+) kB$", re.MULTILINE)


def read_numa_nodes(sys: Path = sysfs.SYS) -> tuple[NumaNode, ...]:
    """Return the nodes that have cores or memory, by number; none if the kernel lists none.

    `distances` of a node has one entry for each node that is online, in the kernel's order.

    Args:
        sys: Where sysfs is mounted.
    """
    root = sys / "devices/system/node"
    indices = sorted(
        int(found[1]) for name in sysfs.names(root) if (found := _NODE.fullmatch(name))
    )
    nodes = (_node(root / f"node{index}", index) for index in indices)
    return tuple(node for node in nodes if node.cpus or node.memory_nbytes)


def _node(path: Path, index: int) -> NumaNode:
    memory = _MEMORY.search(sysfs.text(path / "meminfo"))
    distances = sysfs.text(path / "distance").split()
    return NumaNode(
        index,
        sysfs.text(path / "cpulist"),
        int(memory[1]) * 1024 if memory else 0,
        tuple(int(each) for each in distances if each.isdigit()),
    )
