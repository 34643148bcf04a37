"""Measures loading a checkpoint from disk against reading and hashing its files bare, as a row of
the table.

Both read with O_DIRECT, so that no byte comes from the page cache, on as many threads, into a
memfd of their own. mx also puts each tensor in its place and makes the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mx.memory.arena import MemfdArena
from mx.storage.load import load_opened
from mx.storage.safetensors import open_checkpoint

from . import harness
from .references import disk

#: The number of threads that `mx serve` reads and hashes with.
THREADS = 2
BAR = 0.95


def direct_files(checkpoint: Path, row: str, say: Callable[[str], None]) -> list[Path]:
    """Return a checkpoint's files; none, with the reason to `say`, where the disk has no
    O_DIRECT."""
    files = sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint]
    try:
        os.close(os.open(files[0], os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        say(f"{row} is left out: {files[0]} can't be read with O_DIRECT: {error.strerror}")
        return []
    return files


def rows(checkpoint: Path, rounds: int, say: Callable[[str], None]) -> list[harness.Row]:
    """Return the row; none, with the reason to `say`, where the disk has no O_DIRECT.

    Args:
        checkpoint: A safetensors file, or a folder of them.
        rounds: How many.
        say: Reports what is left out.
    """
    files = direct_files(checkpoint, "load", say)
    if not files:
        return []
    nbytes = sum(file.stat().st_size for file in files)
    samples = harness.interleave(
        {
            "mx": lambda: _load(checkpoint),
            **{f"bare: {way}": partial(disk.load, files, THREADS, way) for way in disk.WAYS},
        },
        rounds,
        fresh_nbytes=nbytes,
    )
    return [harness.ratio("load a checkpoint / bare reads that hash", samples, "bare", BAR, nbytes)]


def _load(checkpoint: Path) -> float:
    start_s = time.perf_counter()
    loaded = load_opened(
        open_checkpoint(checkpoint),
        lambda layout: MemfdArena(layout.arena_nbytes, name="bench"),
        threads=THREADS,
    )
    seconds = time.perf_counter() - start_s
    loaded.arena.release()
    return seconds
