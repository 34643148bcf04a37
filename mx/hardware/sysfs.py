"""Reads small files of sysfs, any of which may be missing or unreadable, and NUMA nodes from there
(Documentation/ABI/stable/sysfs-devices-node)."""

from __future__ import annotations

import re
from pathlib import Path

from mx.core.topology import NumaNode

SYS = Path("/sys")
_NODE = re.compile(r"node(\d+)")
_MEMORY = re.compile(r"^Node \d+ MemTotal:\s+(\d+) kB$", re.MULTILINE)


def text(path: Path) -> str:
    """Return the file's content without outer spaces; "" if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a network driver also raises it for the speed of a link that is down
        return ""


def number(path: Path, unknown: int) -> int:
    """Return the decimal number in the file, or `unknown` if there is none."""
    try:
        return int(text(path))
    except ValueError:
        return unknown


def names(path: Path) -> list[str]:
    """Return the names in a directory, sorted; none if it does not exist."""
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def read_numa_nodes(sys: Path = SYS) -> tuple[NumaNode, ...]:
    """Return the nodes that have cores or memory, by number; none if the kernel lists none.

    `distances` of a node has one entry for each node that is online, in the kernel's order.

    Args:
        sys: Where sysfs is mounted.
    """
    root = sys / "devices/system/node"
    indices = sorted(int(found[1]) for name in names(root) if (found := _NODE.fullmatch(name)))
    nodes = (_node(root / f"node{index}", index) for index in indices)
    return tuple(node for node in nodes if node.cpus or node.memory_nbytes)


def _node(path: Path, index: int) -> NumaNode:
    memory = _MEMORY.search(text(path / "meminfo"))
    distances = text(path / "distance").split()
    return NumaNode(
        index,
        text(path / "cpulist"),
        int(memory[1]) * 1024 if memory else 0,
        tuple(int(each) for each in distances if each.isdigit()),
    )
