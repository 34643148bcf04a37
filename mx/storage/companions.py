"""Decides which further tensor files of a checkpoint travel beside its main weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

from mx.core.packaging import MAX_COMPANIONS, TENSOR_SUFFIX, bad_companion_path, bad_path_set
from mx.errors import CheckpointError, ConfigError
from mx.storage.header import StoredFile

log = logging.getLogger(__name__)

L = TypeVar("L")

#: Mistral's own form of the weights, whose tensors have other names.
_OTHER_FORMS = "consolidated*" + TENSOR_SUFFIX
COPY = "is a copy of the main weights"


def take_companions(
    files: Iterable[tuple[str, L]],
    open_file: Callable[[str, L], StoredFile],
    main: Collection[StoredFile],
    weights: Collection[str],
    left_out: dict[str, str],
) -> tuple[tuple[str, StoredFile], ...]:
    """Return the paths and the files of a checkpoint's companions: what is not a copy of the main
    weights, or was asked for.

    Args:
        files: The paths of all files, in the order of a folder's walk, and where to read them.
        open_file: Returns a tensor file of this name, whose header was read.
        main: The files of the main weights.
        weights: Patterns of the paths of copies that are to travel, too.
        left_out: Gets the tensor files that don't travel, with the reasons.

    Raises:
        ConfigError: A pattern fits no tensor file; or this user may not read one.
        LocalError: The disk fails.
    """
    taken = [file.path for file in main]
    shapes = {t.spec.name: tuple(t.spec.shape) for file in main for t in file.tensors}
    paths = [path for path, _ in files if path.endswith(TENSOR_SUFFIX)]
    for pattern in weights:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise ConfigError(
                f"`weights`: no safetensors file here fits {pattern!r}",
                hint="name one, such as model.fp16.safetensors, or a pattern like *.fp16*",
            )
    found: list[tuple[str, StoredFile]] = []
    for path, location in files:
        if not path.endswith(TENSOR_SUFFIX) or path in taken:
            continue
        reason = bad_companion_path(path)
        if reason is None and len(found) == MAX_COMPANIONS:
            reason = f"comes after the first {MAX_COMPANIONS} further tensor files"
        if reason is None and bad_path_set([*taken, *(p for p, _ in found), path]) is not None:
            reason = "has another file's name, except for upper and lower case"
        if reason is None:
            try:
                file = open_file(path.rpartition("/")[2], location)
            except CheckpointError as error:
                log.warning("%s is left out: %s", path, error.message)
                reason = "is no valid safetensors file"
        if reason is None and not any(t.end > t.begin for t in file.tensors):
            reason = "holds no tensor with bytes"
        if reason is None and not any(fnmatchcase(path, pattern) for pattern in weights):
            reason = COPY if _is_copy(path, file, shapes) else None
        if reason is None:
            found.append((path, file))
        else:
            left_out[path] = reason
    return tuple(found)


def _is_copy(path: str, file: StoredFile, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return True for the same tensors in another precision, an average of them, an older state, or
    another form of them."""
    if fnmatchcase(path.rpartition("/")[2], _OTHER_FORMS):
        return True
    return all(shapes.get(t.spec.name) == tuple(t.spec.shape) for t in file.tensors)
