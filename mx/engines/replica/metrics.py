"""What each rank of an engine loaded, in the engine's own `/metrics`.

The ranks are processes of their own, and the one that answers `/metrics` is mostly none of them.
Where the engine has set up `prometheus_client` for several processes, a rank sets gauges, which all
of them share. Else it leaves a file in a folder whose name they inherit, and a collector in the
registry of the process that answers reads the files.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mx import config, users
from mx.text import plain

log = logging.getLogger(__name__)

#: The labels of `mx_replica_info`. `state` is "checkpoint", "loaded", "processed", or "ordinary"
#: for the engine's own loader; `identity` is that of the weights from peers, in hexadecimal, and
#: `source` who served them.
LABELS = ("model", "revision", "rank", "state", "identity", "source")
_INFO = "mx_replica_info", "What a rank of this engine loaded, and from whom."
_SECONDS = "mx_replica_load_seconds", "Seconds that a rank took to load its weights."
_SHARED = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
_MOST_FILES, _MOST_BYTES, _MOST_CHARACTERS = 1024, 4096, 256

_gauges: list[Any] = []
_registered = False


def show(labels: Mapping[str, str], seconds: float) -> None:
    """Show in the engine's metrics what this process loaded. Never raises.

    Args:
        labels: The values of `LABELS`.
        seconds: How long it took.
    """
    try:
        if config.inherited(*_SHARED):
            from prometheus_client import Gauge

            # Series that processes share can't be removed: what the rank had before is 0.
            before = list(_shown(labels["rank"]))
            if not _gauges:
                _gauges.append(Gauge(*_INFO, LABELS, multiprocess_mode="mostrecent"))
                _gauges.append(Gauge(*_SECONDS, ["rank"], multiprocess_mode="mostrecent"))
            for each in before:
                _gauges[0].labels(*each).set(0)
            _gauges[0].labels(*_values(labels)).set(1)
            _gauges[1].labels(labels["rank"]).set(seconds)
        elif (folder := config.engine_folder()) is not None:
            with contextlib.suppress(FileExistsError):  # another rank was first
                folder.mkdir(0o700)
            _require_private(folder)
            name = re.sub(r"[^\w=]", "-", labels["rank"])
            made = folder / f".{name}.{os.getpid()}"
            made.write_text(json.dumps([*_values(labels), seconds]))
            made.replace(folder / f"{name}.json")
    except Exception as error:  # noqa: BLE001 - the engine goes on
        log.warning("what was loaded is not in the engine's metrics: %s", error)


def _shown(rank: str) -> Iterator[list[str]]:
    """Yield the values of `LABELS` that a rank's gauges have, also those of its earlier process."""
    from prometheus_client import multiprocess

    collector: Any = multiprocess.MultiProcessCollector
    folder = config.inherited(*_SHARED)
    files = Path(folder.get(_SHARED[0]) or folder[_SHARED[1]]).glob("gauge_mostrecent_*.db")
    for family in collector.merge(list(map(str, files))):
        for sample in family.samples:
            if sample.name == _INFO[0] and sample.value and sample.labels["rank"] == rank:
                yield [sample.labels[name] for name in LABELS]


def _values(labels: Mapping[str, str]) -> list[str]:
    return [plain(labels[name])[:_MOST_CHARACTERS] for name in LABELS]


def _require_private(folder: Path) -> None:
    found = folder.stat(follow_symlinks=False)
    ours = stat.S_ISDIR(found.st_mode) and users.is_own(found.st_uid, folder)
    if not ours or found.st_mode & 0o077:
        raise OSError(f"{folder} is not this user's alone")


class EngineCollector:
    """A collector for `prometheus_client`: what this engine's ranks have left in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all ranks that have loaded; none before."""
        from prometheus_client.core import GaugeMetricFamily

        info = GaugeMetricFamily(*_INFO, labels=LABELS)
        taken = GaugeMetricFamily(*_SECONDS, labels=["rank"])
        with contextlib.suppress(OSError):  # no rank has loaded yet
            _require_private(self._folder)
            for file in sorted(self._folder.glob("*.json"))[:_MOST_FILES]:
                with contextlib.suppress(ValueError, TypeError):  # it is not a rank's
                    *values, seconds = json.loads(file.read_text()[:_MOST_BYTES])
                    labels = dict(zip(LABELS, map(str, values), strict=True))
                    taken.add_metric([labels["rank"]], float(seconds))
                    info.add_metric(list(labels.values()), 1)
        yield from (family for family in (info, taken) if family.samples)


def register() -> None:
    """Have this process show what the engine's ranks load; call it in each process of the engine,
    before it starts others. Idempotent."""
    global _registered
    if _registered or config.inherited(*_SHARED):
        return
    from prometheus_client import REGISTRY

    _registered = True
    folder = config.engine_folder()
    if folder is None:
        folder = Path(tempfile.gettempdir(), f"mx-engine-{secrets.token_hex(8)}")
        config.set_default(config.ENGINE_VARIABLE, str(folder))
        atexit.register(_forget, folder, os.getpid())
    REGISTRY.register(EngineCollector(folder))


def _forget(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
