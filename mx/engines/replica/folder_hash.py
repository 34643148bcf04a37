"""Finds the identity of a folder's weights, and remembers it in the index.

That takes a process of its own, with the lowest priority, which ends with its parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from mx.storage.disk_file import Stamp
from mx.storage.folder_index import FolderIndex, settles_in_s
from mx.storage.load import hash_opened
from mx.storage.own_weights import stamps_in
from mx.storage.safetensors import open_checkpoint, tensor_files

#: The longest wait for files to be old enough: one whose time is far ahead is never.
_MAX_WAIT_S = 10.0
#: What the process runs: it finds its modules where this one did.
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mx.engines.replica.folder_hash import main
main()
"""


def identity_of(path: Path, threads: int = 1) -> tuple[str, tuple[Stamp, ...]]:
    """Return the identity of the weights in a folder, and the stamps of their files.

    Reads all of them, and keeps none.

    Args:
        path: A checkpoint.
        threads: How many threads read.

    Returns:
        The identity in hexadecimal; the stamps are () if files may have changed meanwhile, or are
        on a file system whose stamps prove nothing.

    Raises:
        MxError: As `open_checkpoint` and `fill`.
    """
    checkpoint = replace(open_checkpoint(path), companions=())  # they have identities of their own
    found = hash_opened(checkpoint, threads=threads)
    return found.manifest.ref.identity.hex(), found.stamps


def remember(path: Path, state: Path) -> bool:
    """Hash a folder's weights for the index, once their files are old enough.

    Args:
        path: A checkpoint.
        state: The user's state folder.

    Returns:
        True if the index has them now.

    Raises:
        MxError: As `identity_of` and `FolderIndex.record`.
        OSError: The index can't be written.
    """
    stamps = [file.stamp.exact for file in tensor_files(path)[0]]
    time.sleep(min(_MAX_WAIT_S, settles_in_s(stamps)))
    began_ns = time.time_ns()
    identity, found = identity_of(path)
    return FolderIndex(state).record(found, identity, began_ns)


def remember_in_background(path: Path, state: Path) -> threading.Thread | None:
    """Have a process of its own `remember` a folder that the index does not know; return at once.

    Args:
        path: A checkpoint.
        state: The user's state folder.

    Returns:
        The thread that waits for the process; None if there is nothing to hash. Neither keeps this
        process from ending, and the process ends with it.
    """
    stamps = stamps_in(path)
    if not stamps or FolderIndex(state).identity_of(stamps):
        return None
    thread = threading.Thread(target=_run, args=(path, state), name="mx-folder-hash", daemon=True)
    thread.start()
    return thread


def _run(path: Path, state: Path) -> None:
    arguments = [json.dumps(sys.path), str(path.absolute()), str(state.absolute())]
    with (
        contextlib.suppress(OSError),
        subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            # Nothing is written to it: its end says that this process has ended.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
        ) as process,
    ):
        process.wait()


def _end_with_parent() -> None:
    """End when the parent does: it holds the other end of standard input."""
    os.read(0, 1)
    os._exit(1)


def main() -> None:
    """Do what the arguments say; the exit code is 0 if the index has the folder now."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(19)
    done = False
    with contextlib.suppress(Exception):
        done = remember(Path(sys.argv[2]), Path(sys.argv[3]))
    os._exit(0 if done else 1)
