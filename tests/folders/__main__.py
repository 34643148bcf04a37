"""`make folders`: compares what travels of random folders with what is named, and what loads from
peers with what loads from disk.

Each folder is served and pulled: `diff -r` of it and its copy shows what `left_out` names. What
can't be understood is refused when it is served, and leaves nothing. Most are models that
transformers loads, some adapters of PEFT: these load from disk and, by their names, from peers.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers

from mx import config
from tests.folders.checked import checking
from tests.support.commands import commands, start_coordinator

#: For how long one folder may take.
_LIMIT_S = 60


def _too_long(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"it takes longer than {_LIMIT_S} s")


def main() -> int:
    """Check many folders. Returns the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.folders", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for copies of those that failed")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verbosity: Any = transformers.logging
    verbosity.set_verbosity_error()
    verbosity.disable_progress_bar()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    settings, failed, began_s = config.load({}), 0, time.monotonic()
    with commands() as run, tempfile.TemporaryDirectory() as made:
        os.environ["XDG_STATE_HOME"] = made  # which remembers what was compared
        coordinator, _ = start_coordinator(run)
        with checking(Path(made), coordinator, settings) as checker:
            for seed in range(asked.seed, asked.seed + asked.count):
                place = Path(tempfile.mkdtemp())
                signal.alarm(_LIMIT_S)
                try:
                    checker.check(seed, place)
                except Exception as error:  # noqa: BLE001 - reported
                    failed += 1
                    print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
                    if asked.keep is not None:
                        shutil.copytree(place, asked.keep / str(seed), symlinks=True)
                finally:
                    signal.alarm(0)
                    shutil.rmtree(place)
    for what, count in sorted(checker.counts.items()):
        print(f"  {what}: {count}")
    print(f"{asked.count} folders in {time.monotonic() - began_s:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
