"""A checkpoint of the Hugging Face hub: from its cache on this machine, else downloaded into it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mx.core.packaging import TENSOR_SUFFIX
from mx.errors import ClosedError, ConfigError, LocalError, StoreError
from mx.storage.safetensors import Checkpoint, open_checkpoint
from mx.storage.stores import HUB, Opening
from mx.text import plain
from mx.units import format_seconds

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
#: What is downloaded: the weights, and the files that may travel with them.
_PATTERNS = (
    f"*{TENSOR_SUFFIX}",
    *("*.json", "*.txt", "*.md", "*.jinja", "*.tiktoken", "*.bpe", "*.vocab", "*.model", "*.spm"),
)
_CHILD = Path(__file__).with_name("hub_child.py")
_PAUSE_S = 0.1
#: A child that imports and asks the hub writes nothing for a while.
_LEAST_STALL_S = 10.0


def is_hub_id(text: str) -> bool:
    """Return True if this is the form of a repository's id: NAME or ORGANISATION/NAME."""
    return _ID.fullmatch(text) is not None and ".." not in text and "--" not in text


@dataclass(frozen=True, slots=True)
class HubStore:
    """A model on the hub: its id, and a branch, tag or commit."""

    repository: str
    revision: str
    step: str = HUB
    threads: int = 2

    @property
    def place(self) -> str:
        return f"{self.repository}@{self.revision}"

    def open(self, opening: Opening) -> Checkpoint:
        """Find or download the snapshot, and open it. Raises as `Store.open`."""
        if find_spec("huggingface_hub") is None:
            raise _no_extra()
        found = self._run(opening)
        if "path" in found:
            path = Path(found["path"])
            try:
                return open_checkpoint(path)
            except ConfigError as error:
                # Offline, what the cache has may be a tokenizer's files alone.
                raise StoreError(
                    f"{self.place} has no safetensors checkpoint: {error.message}", peer=self.place
                ) from error
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
                    f"the hub does not give {self.place}: {said}",
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
                self._wait(child, opening)
            finally:
                child.kill()
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
            out.seek(0)
            try:
                found = json.loads(out.read(64 * 1024).splitlines()[-1])
            except (ValueError, IndexError):
                said.seek(0)
                last = plain(said.read(64 * 1024).decode(errors="replace")[-300:])
                raise StoreError(
                    f"{self.place}: the download ended with {child.returncode}: {last}",
                    peer=self.place,
                ) from None
        return {str(name): str(value) for name, value in dict(found).items()}

    def _wait(self, child: subprocess.Popen[bytes], opening: Opening) -> None:
        """Wait for the child's end, for as long as it writes anything to disk or elsewhere."""
        limit_s = max(_LEAST_STALL_S, opening.timeout_s)
        written, since_s = -1, time.monotonic()
        while child.poll() is None:
            if opening.cancelled():
                raise ClosedError("the download was cancelled")
            now_written = _written_nbytes(child.pid)
            if now_written != written:
                written, since_s = now_written, time.monotonic()
            elif time.monotonic() - since_s > limit_s:
                raise StoreError(
                    f"the hub sent nothing of {self.place} for {format_seconds(limit_s)}",
                    peer=self.place,
                    hint="`store_timeout_s` is how long it may take",
                )
            time.sleep(_PAUSE_S)


def _written_nbytes(pid: int) -> int:
    """Return how much a process has written so far, to files and sockets."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            lines = dict(line.split(": ") for line in file.read().splitlines())
        return int(lines["wchar"])
    except (OSError, KeyError, ValueError):
        return 0


def _no_extra() -> ConfigError:
    return ConfigError(
        "the Hugging Face hub needs huggingface_hub, which is not installed",
        hint="pip install huggingface_hub, or from a clone of mx: pip install '.[hub]'",
    )
