"""The contract between mx and where weights are kept besides other processes' memory: a store.

A store is found by the scheme of a URL in the entry-point group `mx.stores`: a callable that takes
the URL and an `Opening` and returns a `WeightStore`, whose module is imported when such a URL is
read. The suite in `mx.testing.stores`, not this text, defines what one must do; third parties run
it on theirs. docs/stores.md builds one.

A store lists files and reads ranges of them. All else is mx's: which files make up a checkpoint,
which ranges are read, on which threads, and whether the bytes are right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from mx.errors import ConfigError
from mx.packs import targets
from mx.text import plain
from mx.views import DeviceView

__all__ = ["DeviceView", "ListedFile", "Opening", "WeightStore", "schemes", "shown_url"]

GROUP = "mx.stores"
#: "module:callable" by scheme. Other distributions can't take these over.
BUILT_IN = dict.fromkeys(
    ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "file"),
    "mx.remote.objects:ObjectStore",
)


@dataclass(frozen=True, slots=True)
class Opening:
    """What opening a store may need.

    `cancelled` returns True once the pull is closed; `loop` runs requests; `timeout_s` is how long
    one request may take, or may make no progress.
    """

    cancelled: Callable[[], bool]
    loop: asyncio.AbstractEventLoop
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a store: its path from the store's root, with "/", and its size.

    `version` is what the store vouches for: as long as it is the same, so are the bytes (an entity
    tag, a digest, a time of change). "" vouches for nothing. mx does not look into it.
    """

    path: str
    nbytes: int
    version: str = ""


class WeightStore(Protocol):
    """A place that holds the files of one model. Methods block, and `read` is thread-safe.

    `place` names it for people, without credentials. `threads` is how many reads at a time are
    worth while. A store that can write to a GPU's memory by itself has `reads_devices`, which is
    True; for others the bytes go through host memory.

    mx calls a store of another distribution on threads that it can do without: a call that takes
    longer than `Opening.timeout_s`, or is still running when the pull is closed, is given up, and
    what it writes later reaches no weights. Exceptions that are not mx's become a `StoreError`, but
    FileNotFoundError (CheckpointError) and PermissionError (ConfigError).
    """

    @property
    def place(self) -> str: ...
    @property
    def threads(self) -> int: ...

    def list(self) -> Iterable[ListedFile]:
        """Return the files; mx takes the first 10,000.

        Raises:
            ConfigError: There are none, or this user may not see them.
            StoreError: The store does not answer, or fails.
        """

    def read(self, file: ListedFile, offset: int, view: memoryview) -> int:
        """Fill a view with a file's bytes from an offset on.

        Args:
            file: The file as it was listed.
            offset: The first byte's.
            view: Writable, of bytes, not empty, and not to be used after this returns. Where the
                store `reads_devices` it may be a `DeviceView`, too; mx waits for the end of such a
                read, which has to come soon once `cancelled` returns True.

        Returns:
            How many bytes were written, in the view's first ones. If the file ends before, that is
            less than the view has.

        Raises:
            CheckpointError: The file is gone, or has another version than it was listed with.
            ConfigError: This user may not read it.
            StoreError: The store does not answer, or breaks off.
            LocalError: This machine fails.
            ClosedError: `Opening.cancelled` returned True, or the store was closed.
        """

    def close(self) -> None:
        """Let go of what is open. Idempotent. Reads that were given up may still be running: they
        end soon."""


def shown_url(url: str) -> str:
    """Return a URL as it may be shown.

    Args:
        url: The URL.

    Returns:
        It without what may be a credential: user, password and query.
    """
    parts = urlsplit(url)
    shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="")
    return plain(shown.geturl())


def schemes() -> list[str]:
    """Return the schemes of URLs that a store is there for, the built-in ones first."""
    return list(dict.fromkeys(name for name, _ in targets(GROUP, BUILT_IN)))


def check_url(url: str) -> None:
    """Raise ConfigError if this is not the URL of a store that is there."""
    load_of(url)


def load_of(url: str) -> Callable[[], object]:
    """Return what imports the store of a URL. Raises ConfigError if none is there."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    found = [load for name, load in targets(GROUP, BUILT_IN) if name == parts.scheme]
    if not found or not (parts.netloc or parts.path.strip("/")):
        shown = shown_url(url) if "@" not in url and parts.geturl() else ""
        raise ConfigError(
            f"`object_url={shown}` is not the URL of an object store: there are stores for "
            f"{', '.join(schemes())}",
            hint="write s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER, or install a "
            f"distribution that has the scheme among its entry points in {GROUP}",
        )
    if parts.scheme not in BUILT_IN and len(found) > 1:
        from importlib.metadata import entry_points

        each = entry_points(group=GROUP, name=parts.scheme)
        names = sorted({"?" if entry.dist is None else entry.dist.name for entry in each})
        raise ConfigError(
            f"several distributions bring a store for {parts.scheme}://: {', '.join(names)}",
            hint="uninstall all but one",
        )
    return found[0]
