"""Checks a folder of weights on disk: against a pin, or what a pull has recorded of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mx.core.notes import decode
from mx.core.reference import check_pin
from mx.core.types import Manifest
from mx.errors import CheckpointError, ConfigError
from mx.storage.companions import COPY
from mx.storage.load import HashedCheckpoint, hash_opened
from mx.storage.safetensors import open_checkpoint, tensor_files
from mx.storage.staging import differing, recorded
from mx.text import listed, plain
from mx.units import count

#: As many as read a checkpoint that is served.
_THREADS = 2
_ALONE = "its weights are right"
#: How many tensors that differ are named in `MxError.details`.
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """A folder that holds what it should. `compared` is False where nothing says what that is,
    `recorded` is True if its pull has said it, and `files_too` if the pin covers its files."""

    manifest: Manifest
    compared: bool
    recorded: bool
    files_too: bool
    seconds: float


def verify_folder(
    folder: str | Path,
    pin: str = "",
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_hashed: Callable[[HashedCheckpoint], None] | None = None,
) -> VerifiedFolder:
    """Read and hash all weights in a folder, and compare them with a pin. Blocks.

    Args:
        folder: A folder of safetensors files, or such a file.
        pin: 8 to 64 hexadecimal digits; "" takes the one that the pull to this folder recorded.
        on_progress: Called with (bytes read, bytes in all), from other threads.
        on_hashed: Called with what was found once it was compared, also where there is no pin to
            compare it with.

    Returns:
        What it holds.

    Raises:
        CheckpointError: It holds other weights, or files; or a file is malformed. Where its pull
            has recorded them, the tensors that differ are named, and are the
            `differing_tensors` of `details`: how many (`count`), and the names of the `first`.
        ConfigError: There is no checkpoint, or no pin to compare it with, or that is none.
        LocalError: The disk fails.
    """
    began_s = time.monotonic()
    path = Path(folder)
    record = recorded(path)
    expected = pin or record.partition(" ")[0]
    if expected:
        check_pin(expected)
    elif os.path.exists(path) and on_hashed is None:
        tensor_files(path)  # raises where there are no weights, or this user may not read them
        raise ConfigError(
            f"nothing is recorded of {path}: no pull wrote it, it was copied since, or its file "
            "system keeps no record",
            hint="name its pin; mx models lists them",
        )
    hashed = hash_opened(open_checkpoint(path), threads=_THREADS, progress=on_progress)
    copies = COPY in decode(hashed.manifest.notes).left_out.values()
    if copies and not hashed.manifest.ref.pinned_by(expected):  # they were asked for there
        opened = open_checkpoint(path, weights=["*"])
        hashed = hash_opened(opened, threads=_THREADS, progress=on_progress)
    manifest, ref = hashed.manifest, hashed.manifest.ref
    if not ref.pinned_by(expected):
        files = f" ({ref.pin.hex()} with its files)" if ref.packaging else ""
        said = "as requested" if pin else "as it was pulled"
        is_of_record = any(word.startswith(expected) for word in record.partition("\n")[0].split())
        tensors = differing(path, manifest) if is_of_record else []
        wrong = _wrong(manifest, record, tensors) if is_of_record else ""
        what = "it, or its files alone with `files_only`," if _ALONE in wrong else "it"
        error = CheckpointError(
            f"{path} holds {ref.identity.hex()}{files}, not {expected} {said}"
            + (wrong and f": {wrong}"),
            hint=f"{'check the pin, or ' if pin else ''}pull {what} again, into another folder",
        )
        if tensors:
            differ = {"count": len(tensors), "first": tensors[:_MOST_NAMED]}
            error.details = {"differing_tensors": differ}
        raise error
    if on_hashed is not None:
        on_hashed(hashed)
    record_counts = bool(expected) and not pin
    files_too = bool(ref.packaging and expected) and not ref.weights_alone(expected)
    return VerifiedFolder(
        manifest, bool(expected), record_counts, files_too, time.monotonic() - began_s
    )


def _wrong(manifest: Manifest, record: str, tensors: Sequence[str]) -> str:
    """Return what differs from the record of `CheckpointWriter`, `tensors` as far as they are
    known; "" if that does not say."""
    first, *lines = record.split("\n")
    if " " not in first:  # of an earlier mx
        return ""
    if manifest.ref.identity.hex() != first.partition(" ")[2]:
        named = f" in {count(len(tensors), 'tensor')}: {plain(listed(tensors))}" if tensors else ""
        return f"its weights differ{named}"
    packaging = manifest.packaging
    there = {side.path: side.digest[:8].hex() for side in packaging.side_files}
    there |= {each.path: each.identity[:8].hex() for each in packaging.companions}
    wanted = {name: digest for digest, _, name in (line.partition(" ") for line in lines)}
    missing = [name for name in wanted if name not in there]
    other = [name for name in wanted if there.get(name, wanted[name]) != wanted[name]]
    added = [name for name in there if wanted and name not in wanted]
    sets = (missing, "missing"), (other, "not as it was"), (added, "new")
    said = [f"{plain(listed(names))}: {what}" for names, what in sets if names]
    return "; ".join([_ALONE, *said]) if said else "its weights are right, and its files differ"
