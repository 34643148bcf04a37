"""Measures cold loads from disk into host tensors against bare reads that hash, and against
fastsafetensors, as rows of the table. Each is a process of its own: `disk_load` says what it does.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from . import harness
from .loading import direct_files

BAR, CPU_BAR = 1.1, 1.15


def rows(checkpoint: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return the rows; none, with the reason to `say`, where the disk has no O_DIRECT.

    Args:
        checkpoint: A safetensors file, or a folder of them.
        rounds: How many.
        say: Reports what is left out.
    """
    files = direct_files(checkpoint, "disk", say)
    if not files:
        return []
    ways = ["mx.load", "mx.pull", "preadv"]
    if importlib.util.find_spec("fastsafetensors") is None:
        say("fastsafetensors is not installed: disk is measured without it")
    else:
        ways.append("fastsafetensors")
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    samples = harness.interleave({way: partial(_load, way, files, cpu) for way in ways}, rounds)
    found: list[harness.Row] = []
    for way in ("mx.load", "mx.pull"):
        for what, seconds, bar in (("time", samples, BAR), ("CPU", cpu, CPU_BAR)):
            taken = {each: seconds[each][-rounds:] for each in (way, "preadv")}
            ours, bare = (statistics.median(taken[each]) for each in taken)
            work = f"{way}, cold disk, {what} / two threads that preadv and hash"
            detail = f"{ours:.2f} s against {bare:.2f}"
            found.append(harness.at_most(work, ours / bare, "x", bar, detail, taken, digits=2))
    if "fastsafetensors" in samples:
        ours, theirs = (harness.median(samples, each) for each in ("mx.load", "fastsafetensors"))
        detail = f"{ours:.2f} s against {theirs:.2f}, which verify nothing"
        work = "mx.load, cold disk, time / fastsafetensors nogds"
        found.append(harness.shown(work, ours / theirs, "x", detail, samples))
    return found


def _load(way: str, files: list[Path], cpu: dict[str, list[float]]) -> float:
    module = f"{__package__}.disk_load"
    command = [sys.executable, "-m", module, way, *map(str, files)]
    told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    cpu[way].append(told["cpu_s"])
    return float(told["seconds"])
