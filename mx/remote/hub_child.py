"""Downloads a snapshot from the Hugging Face hub, or finds it in its cache.

Run as a program, by its path, in a process of its own: the library honours its own variables
(HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN), a transfer that hangs can be killed, and the
process that pulls imports none of it. Prints JSON objects, one a line: while another process holds
a file's lock `waits_for`, the folder that it downloads to; at last `path`, or `error` and `kind`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading


def main(repository: str, revision: str, patterns: list[str]) -> dict[str, str]:
    """Return the text to print."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        return {"kind": "extra", "error": str(error)}
    # What a file gets shows that the download gets on: by default it gets 10 MB at a time.
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    constants.FILELOCK_LOG_EVERY_SECONDS = 1
    folder = os.path.join(
        constants.HF_HUB_CACHE, "--".join(["models", *repository.split("/")]), "blobs"
    )
    library = logging.getLogger("huggingface_hub")
    for handler in library.handlers:
        handler.setLevel(logging.WARNING)
    library.setLevel(logging.INFO)
    library.addHandler(_Waiting(folder))
    try:
        path = snapshot_download(
            repository, revision=revision, allow_patterns=patterns, max_workers=4
        )
    except LocalEntryNotFoundError as error:
        return {"kind": "absent", "error": _line(error)}
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        return {"kind": "refused", "error": _line(error)}
    except Exception as error:  # noqa: BLE001 - reported to the parent, whatever it is
        return {"kind": "failed", "error": f"{type(error).__name__}: {_line(error)}"}
    return {"path": path}


class _Waiting(logging.Handler):
    """Prints that a file's lock is waited for, whenever the library says so."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Still waiting to acquire lock"):
            print(json.dumps({"waits_for": self._folder}), flush=True)


def _end_with_parent() -> None:
    """End when the parent does: it holds the other end of standard input."""
    sys.stdin.buffer.read()
    os._exit(1)


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in lines if line), type(error).__name__)[:500]


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    print(json.dumps(main(sys.argv[1], sys.argv[2], sys.argv[3:])), flush=True)
