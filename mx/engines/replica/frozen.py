"""Chooses what a replica starts from in a snapshot (`mx.snapshots`), which the user names; and has
a signal make one of what a replica lends."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mx import packs
from mx.config import Settings
from mx.core.variant import ProcessingKey, differences
from mx.engines.replica.choice import CHECKPOINT, CHECKPOINT_DIGITS, Choice, plain
from mx.engines.replica.names import EligibleModels
from mx.engines.replica.options import LoaderOptions
from mx.errors import ConfigError, MxError


def reader(name: str, module: str = "reading") -> Any:
    """Return what reads snapshots.

    Args:
        name: The function's.
        module: The one of the pack that has it.

    Raises:
        ConfigError: The pack is not there.
    """
    if (found := packs.optional(f"mx.snapshots.{module}:{name}")) is None:
        raise ConfigError("snapshots need the pack mx.snapshots", hint="install mx as a whole")
    return found


def on_signal(freeze: Callable[..., Any], options: LoaderOptions) -> Any:
    """Have a signal freeze what a rank lends, if its options say so.

    Args:
        freeze: Freezes it to a folder; it takes `wait` and `kv_bytes`, as `mx.freeze` does.
        options: The loader's.

    Returns:
        What `close` ends; None if nothing is to be frozen.

    Raises:
        ConfigError: This is not the main thread, or the signal can have no handler.
    """
    if not (name := options.freeze_on):
        return None
    make, folder = reader("SignalFreezer", "signals"), options.freeze_to
    call = functools.partial(freeze, folder, kv_bytes=options.freeze_kv or 0)
    return make(call, folder, signal.Signals[name])


def look(
    folder: str, keys: Mapping[str, ProcessingKey], meant: EligibleModels, settings: Settings
) -> Choice:
    """Choose what to load of a snapshot.

    A state is taken if its key agrees in every field, and the snapshot is signed by the name's
    owner: nothing else says what an engine has made of a checkpoint. A checkpoint is taken as from
    any folder that the user names.

    Args:
        folder: The snapshot's.
        keys: The states that this rank can take, best first, each with its key.
        meant: What may be taken.
        settings: They say who the owner is.

    Returns:
        The choice; with the state "" and the reason if there is nothing to take.
    """
    try:
        snapshot, unsigned = reader("for_engine")(Path(folder), settings)
        return _chosen(snapshot, unsigned, folder, keys, meant)
    except MxError as error:
        return Choice(why=str(error), refused=True)


def _chosen(
    snapshot: Any,
    unsigned: str,
    folder: str,
    keys: Mapping[str, ProcessingKey],
    meant: EligibleModels,
) -> Choice:
    name, revision = snapshot.name, snapshot.revision
    if name not in meant.names or meant.revision not in ("", revision):
        return Choice(why=f"{folder} is of {snapshot.key(0)}", refused=True)
    first = snapshot.ranks[0]
    found = Choice(revision=revision, name=name, snapshot=folder)
    asked = meant.identity or meant.pin.lower()
    if first.variant == CHECKPOINT:
        identity = first.identity.hex()
        if not (identity.startswith(asked) or first.pin.startswith(asked)):
            return Choice(why=f"{folder} holds {identity}, not {asked}", refused=True)
        digits = identity[:CHECKPOINT_DIGITS]
        return found.of(CHECKPOINT, digits, {CHECKPOINT: identity})
    key = ProcessingKey.parse(first.variant)
    for state, own in keys.items():
        if plain(first.variant).bundle == plain(str(own)).bundle:
            of = key.fields.get(CHECKPOINT, "")
            if asked and not (of and (asked.startswith(of) or of.startswith(asked))):
                why = f"{folder} is made of checkpoint {of or 'unknown'}, not of {asked}"
                return Choice(why=why, refused=True)
            if unsigned:
                return Choice(why=f"{folder} is not taken: {unsigned}", refused=True)
            ranks = {each.variant: each.identity.hex() for each in snapshot.ranks}
            return found.of(state, of, ranks)
    fields: list[str] = []
    for own in keys.values():  # the nearest of the states that this engine can take
        here = [
            f"{d.field}: {d.first or 'none'} in the snapshot, {d.second or 'none'} here"
            for d in differences(str(plain(first.variant)), str(next(plain(str(own)).members())))
        ]
        fields = here if not fields or len(here) < len(fields) else fields
    said = "; ".join(fields) or "this engine takes checkpoints only"
    return Choice(why=f"{folder} is another: {said}", refused=True)
