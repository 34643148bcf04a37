"""Reads the machine's network interfaces, NUMA nodes and GPUs from the kernel and NVML.

Every function works on any machine: missing hardware is left out, an unknown value is 0, -1 or ""
in the record, and if a whole source of information is missing there is a reason for it.
"""

from __future__ import annotations

from mx.hardware.gpus import read_gpus
from mx.hardware.nics import read_nics
from mx.hardware.sysfs import read_numa_nodes

__all__ = ["read_gpus", "read_nics", "read_numa_nodes"]
