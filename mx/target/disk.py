"""Reads a model from this machine's disk, as asked for or as a fallback."""

from __future__ import annotations

from collections.abc import Callable

from mx.core.types import Manifest
from mx.errors import CheckpointError, ConfigError
from mx.memory.arena import Arena
from mx.storage.load import load_checkpoint
from mx.storage.staging import Staging
from mx.target.arena import new_arena
from mx.target.options import PullOptions


def load(
    options: PullOptions,
    *,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> tuple[Manifest, Arena]:
    """Read `options.disk` into an arena; blocks. Errors are those of `load_checkpoint`, and those
    of a bad `out`, which are told before anything is read; CheckpointError where a pinned name
    means another identity."""
    if options.disk is None:
        raise ConfigError("no checkpoint to read was named", hint="name it with `path=PATH`")
    if options.out is not None:
        Staging(options.out).leave()
    manifest, arena = load_checkpoint(
        options.disk,
        lambda nbytes: new_arena(options, nbytes),
        chunk_nbytes=options.chunk_nbytes,
        threads=2,
        progress=progress,
        cancelled=cancelled,
    )
    identity, pin = manifest.ref.identity.hex(), options.name.partition("@")[2]
    if options.fall_back_to_disk and not identity.startswith(pin.lower()):
        arena.release()
        raise CheckpointError(f"{options.disk} holds {identity}, not the {pin} that was asked for")
    return manifest, arena
