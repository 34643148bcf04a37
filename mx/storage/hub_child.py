"""Downloads a snapshot from the Hugging Face hub, or finds it in its cache.

Run as a program, by its path, in a process of its own: the library honours its own variables
(HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT, HF_TOKEN), a transfer that hangs can be killed, and the
process that pulls imports none of it. Prints one JSON object: `path`, or `error` and `kind`.
"""

from __future__ import annotations

import json
import os
import sys
import threading


def main(repository: str, revision: str, patterns: list[str]) -> dict[str, str]:
    """Return what is printed."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        return {"kind": "extra", "error": str(error)}
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
