"""Checks of one random folder: its copy, its weights, and what transformers and PEFT load of it."""

from __future__ import annotations

import collections
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

import mx
from mx import config
from mx.api.source import Source
from mx.errors import CheckpointError, ConfigError
from tests.folders.loads import BASE, Models, same
from tests.folders.made import Weights, add_files, into_blobs, main_tensors, some_tensors
from tests.support.folders import covers, missing, tree


@contextmanager
def checking(place: Path, coordinator: str, settings: config.Settings) -> Iterator[Checker]:
    """Serve the base of the adapters, and yield what checks folders.

    Args:
        place: A folder for the models that the random ones are made of.
        coordinator: Where all are served.
        settings: The settings of the process.
    """
    models = Models(place)
    with mx.serve(models.base, model=BASE, coordinator=coordinator, settings=settings):
        yield Checker(models, coordinator, settings)


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

    def _serve(self, folder: Path, name: str) -> Source:
        return mx.serve(folder, model=name, coordinator=self._coordinator, settings=self._settings)

    def _check_copy(self, folder: Path, out: Path, name: str, source: Source) -> None:
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
