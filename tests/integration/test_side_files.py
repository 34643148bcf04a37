"""Side files on their way to `--out`: to disk as they come, whatever their size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mx import api
from mx.units import MIB
from tests.support.commands import environment
from tests.support.daemon import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

FILES, FILE_BYTES = 3, 60 * MIB


# Not ru_maxrss: that begins with what the parent held when it forked.
RUN = """
import atexit, runpy, sys
atexit.register(lambda: sys.stderr.write(open("/proc/self/status").read()))
runpy.run_module("mx", run_name="__main__")
"""


def peak_bytes(*arguments: str) -> int:
    """Run `mx` to its good end. Returns the most memory that it held."""
    child = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        check=False,
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    (line,) = [line for line in child.stderr.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) * 1024


def test_a_pull_holds_no_side_file_in_memory(tmp_path: Path, coordinator: str) -> None:
    source = tmp_path / "source"
    (source / "vocab").mkdir(parents=True)
    save_file({"w": torch.arange(1000)}, source / "model.safetensors")
    for number in range(FILES):
        line = f"{number} and more of it\n"
        text = line * (FILE_BYTES // len(line))
        (source / "vocab" / f"{number}.txt").write_text(text)
    (source / "vocab" / "again.txt").write_text(text)
    (source / "empty.txt").touch()
    out = tmp_path / "out"
    with api.serve(source, model="m", coordinator=coordinator) as served:
        where = ("pull", "m", "--from", f"peer={served.endpoint}")
        without = peak_bytes(*where)
        with_them = peak_bytes(*where, "--out", str(out))
        alone = peak_bytes(*where, "--files-only", "--out", str(tmp_path / "alone"))
    written = sorted(p.relative_to(out) for p in out.rglob("*") if "digests" not in p.parts)
    assert written == sorted(path.relative_to(source) for path in source.rglob("*"))
    for path in written:
        if (source / path).is_file():
            assert (out / path).read_bytes() == (source / path).read_bytes()
            if path.suffix == ".txt":
                assert (tmp_path / "alone" / path).read_bytes() == (source / path).read_bytes()
    assert with_them - without < FILE_BYTES
    assert alone - without < FILE_BYTES
