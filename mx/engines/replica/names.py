"""Which model an engine means: whether a peer's weights are allowed in place of its folder's.

A name does not say what a folder holds. Where the engine's folder has weights of its own, a peer's
are taken only if they are known to be the same: a source of this user on this host has read the
same files, or this user's index has them, or the user says so himself, with a pin or a name in the
loader's options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mx import config
from mx.core.reference import ModelReference, parse_reference
from mx.engines.replica.same_files import sources_of
from mx.errors import ConfigError, MxError
from mx.storage.disk_file import Stamp
from mx.storage.folder_index import FolderIndex
from mx.storage.names import model_name_of
from mx.storage.own_weights import OwnWeights, has_weights
from mx.text import shown


@dataclass(frozen=True)
class EligibleModels:
    """What an engine may take from peers.

    `names` are the models to look for, in this order: in `revision` ("" for the newest), or with
    `pin`, if the user named one. If `identity` (hexadecimal) is known, only weights with this
    identity, and states made of them, are allowed; `how` says how it is known. If `refused` is not
    empty, no peer's weights are allowed, and it says why. `folder` has weights of its own, in files
    with these `stamps` if `identity` is known.
    """

    names: tuple[str, ...] = ()
    revision: str = ""
    pin: str = ""
    identity: str = ""
    how: str = ""
    refused: str = ""
    folder: Path | None = None
    stamps: tuple[Stamp, ...] = ()

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]


def meant_by(called: str, *, given: str = "", revision: str | None = None) -> EligibleModels:
    """Decide which of the peers' weights an engine may take.

    Args:
        called: What the engine's user calls the model: a folder, a hub id, or a name.
        given: The model that the loader's options name, "" for none.
        revision: The revision that the engine's user gave; None and "main" are the newest.

    Raises:
        ConfigError: A name is malformed, or two revisions are given.
    """
    wanted = newest_if_main(revision)
    path = Path(called)
    folder = path if path.exists() and has_weights(path) else None
    if given:
        reference = _named(given, wanted)
        how = "its pin was given" if reference.pin else "it was named in the loader's options"
        return _of(reference, how, folder)
    if folder is None:
        name = model_name_of(path) if path.exists() else called
        return _of(_named(name, wanted), "the name says so", None)
    name = model_name_of(folder)
    try:
        own = OwnWeights(folder)
    except MxError as error:
        found: EligibleModels | str = f"they can't be compared ({error.message})"
    else:
        try:
            found = _same(own, folder, name)
        finally:
            own.close()
    if isinstance(found, EligibleModels):
        return found
    return EligibleModels(
        (name,),
        refused=f"{folder} has weights of its own, and nothing says that a peer's are the same: "
        f'{found}. To take a peer\'s, give the loader "model": "{name}@PIN", or "{name}"',
        folder=folder,
    )


def newest_if_main(revision: str | None) -> str:
    """Return the revision to ask for: "" for "main", which is a hub's word for the newest."""
    return "" if revision in (None, "main") else str(revision)


def _named(text: str, revision: str) -> ModelReference:
    found = parse_reference(text, revision=revision)
    if found.variant:
        raise ConfigError(
            f"{text!r} names a variant", hint="the loader chooses it: write NAME or NAME:REVISION"
        )
    return found


def _of(reference: ModelReference, how: str, folder: Path | None) -> EligibleModels:
    return EligibleModels(
        (reference.name,), reference.revision, reference.pin, how=how, folder=folder
    )


def _same(own: OwnWeights, folder: Path, name: str) -> EligibleModels | str:
    """Return which model has the weights of a folder, or why that is not known."""
    if own.others:
        return f"it has {shown(own.others[0])}, too, which an engine may read instead"
    stamps = own.stamps
    if not stamps:
        return "its file system is not one whose changes this host sees"
    listed = sources_of(stamps)
    identities = {each.identity for each in listed}
    if len(identities) > 1:
        return "this host's sources say different things of the same files"
    names = tuple(dict.fromkeys(each.name for each in listed))
    how = "a source of this host has read the same files"
    if not names:
        identities = {FolderIndex(config.state_folder()).identity_of(stamps)} - {""}
        names, how = (name,), "its files were hashed before"
    if not identities:
        return (
            "no source of this user on this host has read the same files, "
            "and they were not hashed before"
        )
    if not own.unchanged():
        return "its files are being changed"
    return EligibleModels(names, identity=identities.pop(), how=how, folder=folder, stamps=stamps)
