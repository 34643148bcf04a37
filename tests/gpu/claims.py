"""What the tests show, claim by claim: the table that `python -m tests.gpu` ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pytest

from benchmarks.harness import Row

#: The rows of test_speed.py, for the end of the run.
FIGURES = pytest.StashKey[list[Row]]()

#: Claims, and how the names of their tests begin; a test is of the first that fits.
CLAIMS = {
    "torch's own allocations, expandable segments too": [
        *("test_transports.py::test_torch", "test_torch.py"),
    ],
    "cuda_ipc: within a GPU, and to another one": ["test_cuda_ipc.py"],
    "pcie_p2p: host to GPU, GPU to host, GPU to GPU": ["test_pcie_p2p.py"],
    "tcp and ucx from a GPU and into one, through pinned memory": [
        *("test_tcp.py", "test_ucx.py", "test_staged.py"),
    ],
    "attach and copy between processes; deaths, lies, leaks": [
        *("test_transports.py", "test_ends.py", "test_labels.py"),
    ],
    "serve and pull, every byte compared": ["test_pulls.py", "test_end_to_end.py"],
    "digests by mx's kernels equal the host's": ["test_digests.py"],
    "streams wait for verified layers": ["test_signals.py", "test_readiness.py"],
    "CUDA graphs restored in another process, bit for bit": ["test_graphs.py"],
    "host memory is reached in place": ["test_host_memory.py"],
    "from disk, by pinned slots and by cuFile": ["test_disk.py"],
    "arenas and pinned rings": ["test_arena.py", "test_ring.py"],
    "the driver does what mx relies on": ["test_driver.py"],
    "GPUs and their links, as NVML says": ["test_nvml.py"],
    "as fast as the bars say (0.9 of a bare copy, attach in 60 ms)": ["test_speed.py"],
    "the benchmark runs": ["test_benchmark.py"],
}
_OUTCOMES = ("passed", "failed", "skipped")


def claim_of(name: str) -> str:
    """Return the claim of a test, by its file and name: "test_ring.py::test_up_and_down[0]"."""
    for claim, beginnings in CLAIMS.items():
        if name.startswith(tuple(beginnings)):
            return claim
    return "others"


def table(outcomes: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return the lines of the table.

    Args:
        outcomes: The tests by file and name, and how each ended: passed, failed or skipped.
    """
    counts: dict[str, Counter[str]] = {claim: Counter() for claim in CLAIMS}
    for name, outcome in outcomes:
        counts.setdefault(claim_of(name), Counter())[outcome] += 1
    width = max(map(len, counts))
    lines = [f"{'claim':{width}} " + " ".join(f"{each:>7}" for each in _OUTCOMES)]
    for claim, count in counts.items():
        lines.append(f"{claim:{width}} " + " ".join(f"{count[each]:7}" for each in _OUTCOMES))
    return lines
