"""A checkpoint of the Hugging Face hub: from its cache on this machine, else downloaded into it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mx.core.packaging import TENSOR_SUFFIX, TEXT_NAMES, TEXT_SUFFIXES
from mx.errors import ClosedError, ConfigError, LocalError, StoreError, install_hint
from mx.storage.safetensors import Checkpoint
from mx.storage.stores import HUB, DiskStore
from mx.stores import Opening
from mx.text import plain
from mx.units import format_seconds

log = logging.getLogger(__name__)

#: What is downloaded: the weights, and the files that may travel with them.
_PATTERNS = (
    f"*{TENSOR_SUFFIX}",
    *(f"*{suffix}" for suffix in (*TEXT_SUFFIXES, ".model", ".model.v*", ".spm")),
    *(name.upper() for name in TEXT_NAMES),
)
_CHILD = Path(__file__).with_name("hub_child.py")
_PAUSE_S = 0.1
#: A child that imports and asks the hub writes nothing for a while.
_LEAST_STALL_S = 10.0
#: The child says each second that it waits for another process's download: it does so no more if it
#: has not said so for this long.
_WAITED_S = 4.0


@dataclass(frozen=True, slots=True)
class HubStore:
    """A model on the hub: its id, and a branch, tag or commit."""

    repository: str
    revision: str
    step: str = HUB

    @property
    def place(self) -> str:
        return f"{self.repository}@{self.revision}"

    def open(self, opening: Opening) -> Checkpoint:
        """Find or download the snapshot, and open it. Raises as `CheckpointStore.open`."""
        folder = self.folder(opening)
        try:
            return folder.open(opening)
        except ConfigError as error:
            # Offline, what the cache has may be a tokenizer's files alone.
            raise StoreError(
                f"{self.place} has no safetensors checkpoint: {error.message}", peer=self.place
            ) from error

    def folder(self, opening: Opening) -> DiskStore:
        """Find or download the snapshot: its folder in the cache. Raises as `open`."""
        if find_spec("huggingface_hub") is None:
            raise _no_extra()
        found = self._run(opening)
        if "path" in found:
            return DiskStore(Path(found["path"]))
        said = plain(found.get("error", "it said nothing"))
        match found.get("kind"):
            case "extra":
                raise _no_extra()
            case "absent":
                raise StoreError(
                    f"{self.place} is not in the cache, and the hub was not asked or did not "
                    f"answer: {said}",
                    peer=self.place,
                    hint="HF_HUB_OFFLINE and HF_HOME say where it is looked for",
                )
            case "refused":
                raise ConfigError(
                    f"the hub refuses {self.place}: {said}",
                    hint="check `hub_id`, its revision, and HF_TOKEN",
                )
            case _:
                raise StoreError(f"{self.place} could not be downloaded: {said}", peer=self.place)

    def _run(self, opening: Opening) -> dict[str, str]:
        command = [sys.executable, "-P", str(_CHILD), self.repository, self.revision, *_PATTERNS]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
            try:
                # It ends when its standard input does, and so not after this process.
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=said)
            except OSError as error:
                raise LocalError(f"no process could be started: {error.strerror}") from error
            try:
                self._wait(child, out.fileno(), opening)
            finally:
                child.kill()
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
            out.seek(max(0, out.seek(0, os.SEEK_END) - 64 * 1024))
            try:
                found = json.loads(out.read().splitlines()[-1])
            except (ValueError, IndexError):
                said.seek(0)
                last = plain(said.read(64 * 1024).decode(errors="replace")[-300:])
                raise StoreError(
                    f"{self.place}: the download ended with {child.returncode}: {last}",
                    peer=self.place,
                ) from None
        return {str(name): str(value) for name, value in dict(found).items()}

    def _wait(self, child: subprocess.Popen[bytes], said: int, opening: Opening) -> None:
        """Wait for the child's end, for as long as it gets on, or the process that it waits for.

        Args:
            child: The child.
            said: A descriptor of what it has printed.
            opening: See `open`.
        """
        limit_s = max(_LEAST_STALL_S, opening.timeout_s)
        waits = _Waits(said)
        before: object = None
        since_s = time.monotonic()
        while child.poll() is None:
            if opening.cancelled():
                raise ClosedError("the download was cancelled")
            was_waiting, folder = waits.folder, waits.update()
            if folder and not was_waiting:
                log.info("%s: another process downloads it, and is waited for", self.place)
            now = _state(folder) if folder else _written_nbytes(child.pid)
            if now != before:
                before, since_s = now, time.monotonic()
            # Another pull gives up after as long: then this one takes over.
            elif time.monotonic() - since_s > (2 * limit_s if folder else limit_s):
                who = "another process that downloads it got" if folder else "the hub sent"
                raise StoreError(
                    f"{who} nothing of {self.place} for {format_seconds(limit_s)}",
                    peer=self.place,
                    hint="end that process"
                    if folder
                    else "`store_timeout_s` is how long it may take",
                )
            time.sleep(_PAUSE_S)


class _Waits:
    """Whether a child waits for another process's download, by what it prints. `folder` is where
    that process writes; empty while it does not wait."""

    def __init__(self, said: int) -> None:
        self.folder = ""
        self._said = said
        self._read_nbytes = 0
        self._until_s = 0.0

    def update(self) -> str:
        """Read what is new, and return `folder`."""
        new = os.pread(self._said, 64 * 1024, self._read_nbytes)
        new = new[: new.rfind(b"\n") + 1]
        self._read_nbytes += len(new)
        for line in new.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                self.folder = str(json.loads(line)["waits_for"])
                self._until_s = time.monotonic() + _WAITED_S
        if time.monotonic() > self._until_s:
            self.folder = ""
        return self.folder


def _state(folder: str) -> tuple[int, int, int]:
    """Return what changes while files are written in a folder: their number, blocks and newest
    time."""
    files = blocks = newest_ns = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    files, blocks = files + 1, blocks + found.st_blocks
                    newest_ns = max(newest_ns, found.st_mtime_ns)
    except OSError:
        pass  # it is not made yet
    return files, blocks, newest_ns


def _written_nbytes(pid: int) -> int:
    """Return how much a process has written so far."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            lines = dict(line.split(": ") for line in file.read().splitlines())
        return int(lines["wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def _no_extra() -> ConfigError:
    return ConfigError(
        "the Hugging Face hub needs huggingface_hub, which is not installed",
        hint=install_hint("hub"),
    )
