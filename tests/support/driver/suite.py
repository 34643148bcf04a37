"""The tests of GPUs over the stand-in, in parts that run by themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.driver.build import why_not

_ROOT = Path(__file__).parents[3]
#: The second major's operations are late: work is done only well after it was queued.
_SETTINGS = {12: ["--set", "LATE_US=300"], 13: []}
#: Run by themselves, since they take long; all others are the last part.
_LONG = [
    ["test_cuda_ipc.py"],
    ["test_digests.py"],
    ["test_disk.py"],
    ["test_end_to_end.py"],
    ["test_pcie_p2p.py"],
    ["test_staged.py"],
    ["test_tcp.py"],
    ["test_ucx.py"],
]
_FILES = {path.name for path in (_ROOT / "tests/gpu").glob("test_*.py")}
PARTS = [*_LONG, sorted(_FILES - {name for part in _LONG for name in part})]


def run_part(major: int, part: list[str]) -> None:
    """Run files of tests/gpu over the stand-in of a major of CUDA; skips without its packages."""
    if reason := why_not(major):
        pytest.skip(reason)
    pytest.importorskip("triton")
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.gpu",
            "--standin",
            str(major),
            *_SETTINGS[major],
            "-q",
            *part,
        ],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
