"""Reads snapshots: a rank as a checkpoint, and as a step of a pull's chain."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from mx.config import Settings
from mx.core.layout import TensorSpec, plan_layout
from mx.core.manifest import read_packaging
from mx.core.packaging import MAX_SIDE_FILE_BYTES, bad_path, bad_side_path
from mx.core.reference import ModelReference
from mx.core.revisions import MAIN
from mx.core.types import CHECKPOINT, Layout, Packaging, SideFile
from mx.core.variant import differences, nearest
from mx.errors import CheckpointError, ConfigError, ManifestError, MxError
from mx.publickey import parse
from mx.snapshots.container import (
    FILES,
    WEIGHTS,
    FrozenRank,
    Snapshot,
    fail,
    folder_of,
    read,
    stored_shape,
)
from mx.snapshots.signing import trusted
from mx.storage.disk_file import DiskFile, read_tensor_file
from mx.storage.header import FileTensor
from mx.storage.osfile import open_regular, read_error
from mx.storage.safetensors import Checkpoint
from mx.storage.stores import SNAPSHOT, DiskStore
from mx.text import listed, shown

if TYPE_CHECKING:
    from mx.fetching.options import PullOptions


def opened(folder: Path) -> Checkpoint:
    """Return a rank of a snapshot as the checkpoint that it was frozen from: its headers and side
    files are read and checked.

    Args:
        folder: The rank's.

    Raises:
        MxError: As `read`, and as `mx.storage.safetensors.open_checkpoint`.
    """
    here = Path(os.path.abspath(folder))
    snapshot = read(here.parent)
    found = [n for n in range(len(snapshot.ranks)) if folder_of(here.parent, n) == here]
    if not found:
        fail(here, f"the snapshot in {here.parent} has no such rank")
    rank = snapshot.ranks[found[0]]
    file = read_tensor_file(here / WEIGHTS, WEIGHTS)
    tensors = tuple(_as_in_memory(each, rank, file) for each in file.tensors)
    missing = rank.strides.keys() - {each.spec.name for each in tensors}
    if missing:
        fail(file.location, f"it has no tensor {shown(min(missing))}")
    names = [each.spec.name for each in tensors]
    try:
        packaging = read_packaging(rank.packaging, names) if rank.packaging else Packaging()
    except ManifestError as error:
        fail(here.parent, error.message)
    sides = {each.digest: _side_file(here, each) for each in packaging.side_files}
    return Checkpoint(
        here,
        (replace(file, tensors=tensors),),
        rank.aliases,
        packaging,
        sides,
        {},
        identity=rank.identity,
    )


def _as_in_memory(stored: FileTensor, rank: FrozenRank, file: DiskFile) -> FileTensor:
    """Return a tensor of a rank's file with the model's shape and strides."""
    spec = stored.spec
    form = rank.strides.get(spec.name)
    if form is None:
        return stored
    found = TensorSpec(spec.name, spec.dtype, *form)
    try:
        same = found.nbytes == spec.nbytes and stored_shape(*form) == spec.shape
    except ManifestError:
        same = False
    if not same:
        fail(file.location, f"the strides of {shown(spec.name)} are not those of what it holds")
    return replace(stored, spec=found)


def _side_file(folder: Path, side: SideFile) -> bytes:
    """Return a side file of a rank, of which the packaging has the digest."""
    path, nbytes = side.path, side.nbytes
    if bad_side_path(path) or nbytes > MAX_SIDE_FILE_BYTES:
        fail(folder, f"it names the file {shown(path)}")
    for where in (folder / FILES / path, folder.parent / FILES / path):
        try:
            with open(open_regular(where), "rb") as file:
                data = file.read(nbytes + 1)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise read_error(error, where) from error
        if len(data) == nbytes and blake3(data).digest() == side.digest:
            return data
        fail(where, "it is not what was frozen")
    fail(folder.parent, f"it has no {FILES}/{path}")


def rank_of(snapshot: Snapshot, variant: str) -> int:
    """Return which rank of a snapshot a variant is.

    Args:
        snapshot: The snapshot.
        variant: The variant; "" for the checkpoint, or the only rank.

    Raises:
        ConfigError: The snapshot has another; the fields that differ are named.
    """
    variants = [each.variant for each in snapshot.ranks]
    if not variant and (len(variants) == 1 or CHECKPOINT in variants):
        return variants.index(CHECKPOINT) if CHECKPOINT in variants else 0
    if variant in variants:
        return variants.index(variant)
    if not variant:
        raise ConfigError(
            f"{snapshot.folder} has {len(variants)} ranks: {listed(variants)}",
            hint="name one of them with `variant`",
        )
    raise ConfigError(
        f"{snapshot.folder} is of another variant: {differing(variants, variant)}",
        hint="thaw it in an engine like the one that it was frozen from, or pull the checkpoint",
    )


def differing(variants: list[str], wanted: str) -> str:
    """Return in which fields the nearest of a snapshot's variants differs from another, for
    people."""
    found = nearest(wanted, variants)
    fields = differences(variants[0], wanted) if found is None else found[1]
    return "; ".join(
        f"{each.field}: {each.first or 'none'} in the snapshot, {each.second or 'none'} here"
        for each in fields
    )


def check_asked(snapshot: Snapshot, number: int, name: str, revision: str, pin: str) -> None:
    """Check that a rank of a snapshot is what is asked for.

    Args:
        snapshot: The snapshot.
        number: The rank.
        name: The model's name.
        revision: Its revision; "" for any.
        pin: The beginning of its identity, or of its pin; "" for any. With it the name does not
            matter.

    Raises:
        CheckpointError: The pin is of others.
        ConfigError: The snapshot is of another model.
    """
    rank = snapshot.ranks[number]
    named = name, revision or snapshot.revision
    if not pin and named != (snapshot.name, snapshot.revision):
        raise ConfigError(
            f"{snapshot.folder} is a snapshot of {snapshot.key(number)}",
            hint="name that, or the pin (NAME@PIN)",
        )
    if pin and not any(each.startswith(pin.lower()) for each in (rank.identity.hex(), rank.pin)):
        raise CheckpointError(
            f"{snapshot.folder} holds {rank.identity.hex()} ({rank.pin} with its files), not {pin} "
            "as requested",
            hint="check the pin, and the folder",
        )


def from_snapshot(options: PullOptions, settings: Settings) -> PullOptions:
    """Return a pull's options with the rank of a snapshot that it is to read, pinned by what the
    snapshot says of it.

    Args:
        options: The options; their store is the snapshot's folder.
        settings: They name whose signatures count.

    Raises:
        CheckpointError: The snapshot is malformed, or holds other weights than are asked for.
        ConfigError: There is none, or it is of another model, or variant.
        LocalError: The disk fails.
    """
    (store,) = options.stores
    assert isinstance(store, DiskStore)
    snapshot = read(store.path)
    name, pin = options.key.name, options.pin
    number = rank_of(snapshot, options.variant)
    rank = snapshot.ranks[number]
    check_asked(snapshot, number, name, options.revision, pin)
    why = trusted(snapshot, options.owners, settings)
    if options.owners and why and not pin:
        raise ConfigError(
            f"nothing in {snapshot.folder} shows that it is {name} of its `owner`: {why}",
            hint="name the pin",
        )
    return replace(
        options,
        # Files alone prove no pin; each has the digest that the snapshot names.
        name=f"{name}@{pin or rank.pin}" if pin or not options.files_only else name,
        revision=options.revision or snapshot.revision,
        variant=rank.variant,
        stores=(DiskStore(folder_of(snapshot.folder, number), step=SNAPSHOT),),
        defined_by="" if pin or not why else SNAPSHOT,
    )


def step(settings: Settings, model: ModelReference) -> DiskStore | str:
    """Return the step of a pull's chain that reads a snapshot, or why there is none.

    Args:
        settings: They name the folder that has snapshots by the names of models.
        model: What is pulled.
    """
    root = settings.value("snapshot_root")
    if not root:
        return SNAPSHOT  # it is not among the steps
    if reason := bad_path(model.name):
        return f"the name of the model {reason}, so it names no folder"
    try:
        snapshot = read(Path(root) / model.name)
        number = rank_of(snapshot, model.variant)
    except MxError as error:
        return error.message
    if model.revision not in ("", MAIN, snapshot.revision) and not model.pin:
        return f"{snapshot.folder} is of {snapshot.key(number)}"
    return DiskStore(folder_of(snapshot.folder, number), step=SNAPSHOT)


# -- for engines ----------------------------------------------------------------------------------


def for_engine(folder: Path, settings: Settings) -> tuple[Snapshot, str]:
    """Return a snapshot, and "" if it is known to be the name's owner's, else why not.

    Args:
        folder: The folder.
        settings: They name the owner, or this user's key.

    Raises:
        MxError: As `read`.
    """
    snapshot = read(folder)
    owners = (parse(settings.owner),) if settings.owner else ()
    return snapshot, trusted(snapshot, owners, settings)


def layout_of(folder: Path, variant: str) -> Layout:
    """Return the layout of a rank, for those who make memory for it to fill. Raises as `opened`."""
    checkpoint = opened(folder_of(folder, rank_of(read(folder), variant)))
    return plan_layout(checkpoint.specs, checkpoint.aliases)


def files_of(folder: Path) -> tuple[FrozenRank, dict[str, bytes]]:
    """Return the first rank of a snapshot, and its files by path. Raises as `opened`."""
    checkpoint = opened(folder_of(folder, 0))
    sides = checkpoint.packaging.side_files
    found = {each.path: checkpoint.side_documents[each.digest] for each in sides}
    return read(folder).ranks[0], found
