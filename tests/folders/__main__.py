"""`make folders`: compares what travels of random folders with what is named, and what loads from
peers with what loads from disk.

Each folder is served and pulled: `diff -r` of it and its copy shows what `left_out` names. What
can't be understood is refused when it is served, and leaves nothing. Most are models that
transformers loads, some adapters of PEFT: these load from disk and, by their names, from peers.
"""

from __future__ import annotations

import argparse
import collections
import logging
import os
import random
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
from safetensors.torch import load_file

import mx
from mx import config
from mx.errors import CheckpointError, ConfigError
from tests.folders.loads import BASE, Models, same
from tests.folders.made import Weights, add_files, into_blobs, main_tensors, some_tensors
from tests.support.commands import commands, start_coordinator
from tests.support.folders import covers, missing, tree

#: For how long one folder may take.
_LIMIT_S = 60


class Checker:
    """Checks random folders against one coordinator."""

    def __init__(self, models: Models, coordinator: str, settings: config.Settings) -> None:
        self._models = models
        self._coordinator = coordinator
        self._settings = settings
        self.counts: collections.Counter[str] = collections.Counter()

    def check(self, seed: int, place: Path) -> None:
        """Serve, pull and load one random folder.

        Raises:
            AssertionError: The copy lacks what was not named, or what is loaded has other content.
        """
        choose = random.Random(seed)
        torch.manual_seed(seed)
        folder, name, kind = place / "m", f"org/m{seed}", choose.random()
        folder.mkdir()
        if kind < 0.06:
            self._models.random_adapter(folder, choose)
            add_files(folder, {}, choose)
            with self._serve(folder, name) as source:
                self._check_copy(folder, place / "out", name, source)
                self._models.check_adapter(folder, name, self._coordinator)
            self.counts["adapters"] += 1
            return
        is_model = kind < 0.75
        tensors = self._models.random_model(folder, choose) if is_model else {}
        tensors |= some_tensors(choose, 6) or {"t.last": torch.randn(5, 3)}
        weights = Weights(folder, tensors, choose)
        if weights.spoilt:
            self._check_refused(folder, name, weights.spoilt)
            return
        add_files(folder, tensors, choose)
        if choose.random() < 0.15:
            folder = into_blobs(folder, place / "models--org--m", choose)
            self.counts["snapshots"] += 1
        for odd in weights.odd:
            self.counts[odd.strip("_")] += 1
        with self._serve(folder, name) as source:
            self._check_copy(folder, place / "out", name, source)
            found = mx.load(name, coordinator=self._coordinator, settings=self._settings)
            same(found, main_tensors(folder))
            companions = [each.path for each in source.manifest.packaging.companions]
            for path in companions[:1]:
                companion = mx.load(
                    name, companion=path, coordinator=self._coordinator, settings=self._settings
                )
                same(companion, load_file(folder / path))
                self.counts["companions"] += 1
            if is_model:
                outcome = self._models.check_model(folder, name, self._coordinator, choose)
                self.counts[f"models {outcome}"] += 1

    def _serve(self, folder: Path, name: str) -> Any:
        return mx.serve(folder, model=name, coordinator=self._coordinator, settings=self._settings)

    def _check_copy(self, folder: Path, out: Path, name: str, source: Any) -> None:
        said = source.notes.left_out
        with mx.pull(name, out=out, coordinator=self._coordinator, settings=self._settings) as pull:
            report = pull.wait()
        assert report.folder is not None
        assert report.folder.left_out == said
        absent = missing(folder, out)
        assert covers(said, absent), f"named {sorted(said)}, missing {sorted(absent)}"
        there = tree(folder)
        for path, data in tree(out).items():
            assert there[path] == data, path
        with self._serve(out, name) as again:
            assert not again.notes.left_out
            assert again.pinned == source.pinned

    def _check_refused(self, folder: Path, name: str, spoilt: str) -> None:
        before, opened = tree(folder), _open_files()
        try:
            self._serve(folder, name).close()
        except (CheckpointError, ConfigError):
            self.counts["refused"] += 1
        else:
            raise AssertionError(f"a folder is served that is spoilt: {spoilt}")
        assert tree(folder) == before
        assert not _open_files() - opened
        listed = mx.list_models(coordinator=self._coordinator, settings=self._settings)
        assert all(each.model.name != name for each in listed)


def _open_files() -> set[str]:
    """Return what this process has open: its files and memfds, no sockets."""
    found = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{each}")
        except FileNotFoundError:  # the listing's own
            continue
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            found.add(f"{each} {target}")
    return found


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
        models = Models(Path(made))
        checker = Checker(models, coordinator, settings)
        with mx.serve(models.base, model=BASE, coordinator=coordinator, settings=settings):
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
