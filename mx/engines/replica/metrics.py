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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mx import config
from mx.text import plain

log = logging.getLogger(__name__)

_MOST_FILES = 1024
_MOST_BYTES = 4096
_MOST_CHARACTERS = 256
_INFO = "mx_replica_info", "What a rank of this engine loaded, and from whom."
_SECONDS = "mx_replica_load_seconds", "Seconds that a rank took to load its weights."


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank loaded. `state` is "checkpoint", "loaded", "processed", or "ordinary" for the
    engine's own loader; `identity` is that of the weights from peers, in hexadecimal, and `source`
    who gave them."""

    model: str
    revision: str
    rank: str
    state: str
    identity: str
    source: str
    seconds: float

    @property
    def labels(self) -> dict[str, str]:
        """The labels of `mx_replica_info`."""
        found = {name: plain(str(value)) for name, value in asdict(self).items()}
        return {name: value[:_MOST_CHARACTERS] for name, value in found.items() if name in _LABELS}


_LABELS = [each.name for each in fields(Loaded) if each.name != "seconds"]


def show(loaded: Loaded) -> None:
    """Show in the engine's metrics what this process loaded. Never raises."""
    try:
        if config.inherited("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
            _set_gauges(loaded)
        elif (folder := config.engine_folder()) is not None:
            _leave_file(folder, loaded)
    except Exception as error:  # noqa: BLE001 - the engine goes on
        log.warning("what was loaded is not in the engine's metrics: %s", error)


_gauges: list[Any] = []


def _set_gauges(loaded: Loaded) -> None:
    from prometheus_client import Gauge

    if not _gauges:
        _gauges.append(Gauge(*_INFO, _LABELS, multiprocess_mode="mostrecent"))
        _gauges.append(Gauge(*_SECONDS, ["rank"], multiprocess_mode="mostrecent"))
    info, seconds = _gauges
    info.labels(**loaded.labels).set(1)
    seconds.labels(loaded.rank).set(loaded.seconds)


def _leave_file(folder: Path, loaded: Loaded) -> None:
    with contextlib.suppress(FileExistsError):  # another rank was first
        folder.mkdir(0o700)
    if not _is_private(folder):
        raise OSError(f"{folder} is not this user's alone")
    name = re.sub(r"[^\w=]", "-", loaded.rank)
    made = folder / f".{name}.{os.getpid()}"
    made.write_text(json.dumps(asdict(loaded)))
    made.replace(folder / f"{name}.json")


def _is_private(folder: Path) -> bool:
    found = folder.stat(follow_symlinks=False)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return ours and not found.st_mode & 0o077


class Collector:
    """A collector for `prometheus_client`: what this engine's ranks have left in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of all ranks that have loaded; none before."""
        from prometheus_client.core import GaugeMetricFamily

        info = GaugeMetricFamily(*_INFO, labels=_LABELS)
        seconds = GaugeMetricFamily(*_SECONDS, labels=["rank"])
        for loaded in self._read():
            info.add_metric([loaded.labels[name] for name in _LABELS], 1)
            seconds.add_metric([loaded.rank], loaded.seconds)
        if info.samples:
            yield info
            yield seconds

    def _read(self) -> Iterator[Loaded]:
        try:
            if not _is_private(self._folder):
                return
            files = sorted(self._folder.glob("*.json"))[:_MOST_FILES]
        except OSError:  # no rank has loaded yet
            return
        for file in files:
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                yield _loaded(json.loads(file.read_text()[:_MOST_BYTES]))


def _loaded(found: Mapping[str, Any]) -> Loaded:
    """Return what a file says. Raises TypeError, ValueError, LookupError."""
    return Loaded(**{**found, "seconds": float(found["seconds"])})


_registered = False


def register() -> None:
    """Have this process show what the engine's ranks load; call it in each process of the engine,
    before it starts others. Idempotent."""
    global _registered
    if _registered or config.inherited("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        return
    from prometheus_client import REGISTRY

    _registered = True
    first = config.engine_folder() is None
    folder = Path(tempfile.gettempdir(), f"mx-engine-{secrets.token_hex(8)}")
    config.set_default(config.ENGINE_VARIABLE, str(folder))
    folder = config.engine_folder() or folder
    REGISTRY.register(Collector(folder))
    if first:
        atexit.register(_forget, folder, os.getpid())


def _forget(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
