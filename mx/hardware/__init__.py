"""What the machine has: network interfaces, NUMA nodes, GPUs. Read from the kernel and NVML.

Everything here answers on any machine: what is not there is left out, what can't be learned is 0,
-1 or "" in the record, and where a whole source of knowledge is missing there is a reason for it.
"""

from __future__ import annotations

from mx.hardware.gpus import read_gpus
from mx.hardware.nics import read_nics
from mx.hardware.numa import read_numa_nodes
from mx.hardware.topology import Topology

__all__ = ["Topology", "read_gpus", "read_nics", "read_numa_nodes"]
