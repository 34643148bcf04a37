"""Signs snapshots, and says whose a signature is."""

from __future__ import annotations

from dataclasses import replace

from mx import namekey
from mx.config import Settings
from mx.core.ownership import COMMITMENT_BYTES, SIGNATURE_BYTES
from mx.core.types import ManifestRef
from mx.core.vouching import decode, endorsement_text
from mx.errors import ConfigError, NotAllowedError
from mx.lenderkey import read
from mx.namekey import NameKey
from mx.publickey import PublicKey, is_signed
from mx.snapshots.container import SNAPSHOT, Snapshot, fail

#: What a lender key has to be for.
_KIND = "snapshots"


def signed(snapshot: Snapshot, key: NameKey) -> Snapshot:
    """Return a snapshot with the signature of a name key, or of a lender key.

    Raises:
        NotAllowedError: The lender key is not for snapshots of this name.
    """
    commitment, name = key.commitment(snapshot.name), snapshot.name
    certificate = key.certificate(name) if commitment else b""
    if not commitment or (certificate and _KIND not in read(name, commitment, certificate).kinds):
        raise NotAllowedError(
            f"this lender key signs no snapshots of {name}",
            hint="have its owner make one for snapshots (`mx keygen`), or freeze with a pin",
        )
    said = {
        "certificate": certificate.hex(),
        "commitment": commitment.hex(),
        "endorsement": _endorsement(snapshot, key).hex(),
        "signature": key.sign(name, snapshot.signed_text()).hex(),
    }
    return replace(snapshot, signature=said)


def _endorsement(snapshot: Snapshot, key: NameKey) -> bytes:
    """Return what shows that the owner key that `mx keygen` prints is the name's; b"" for a lender
    key, which has none."""
    rank, model = snapshot.ranks[0], snapshot.key(0)
    ref = ManifestRef(rank.identity, b"", b"", (0, 0, 0))
    made = decode(key.vouch(model, ref, (), 0, updates=False), model, is_signed)
    return b"" if made is None else made.endorsement


def signer(snapshot: Snapshot) -> tuple[bytes, str]:
    """Return the commitment of the name key by which a snapshot is signed, and ""; or b"" and why
    none counts.

    Raises:
        CheckpointError: What is signed is not what it says.
    """
    if snapshot.signature is None:
        return b"", "it is not signed"
    where = snapshot.folder / SNAPSHOT
    try:
        names = ("commitment", "certificate", "signature")
        commitment, certificate, signature = (
            bytes.fromhex(snapshot.signature[name]) for name in names
        )
    except (KeyError, ValueError):
        fail(where, "its signature is malformed")
    if len(commitment) != COMMITMENT_BYTES or len(signature) != SIGNATURE_BYTES:
        fail(where, "its signature is malformed")
    public = commitment
    if certificate:
        try:
            allowed = read(snapshot.name, commitment, certificate)
        except NotAllowedError as error:
            return b"", error.message
        if _KIND not in allowed.kinds:
            return b"", f"its lender key is not for snapshots of {snapshot.name}"
        public = allowed.public
    if not is_signed(public, signature, snapshot.signed_text()):
        fail(where, "its signature is not of what it says: it was changed, or is damaged")
    return commitment, ""


def trusted(snapshot: Snapshot, owners: tuple[PublicKey, ...], settings: Settings) -> str:
    """Return "" if a snapshot is signed by this user's key for its name, or by one of the owners
    that the user names; else why it is not known to be the owner's.

    Args:
        snapshot: The snapshot.
        owners: The keys of which one has to be the name's owner's; () takes this user's own.
        settings: They name the user's key.

    Raises:
        CheckpointError: As `signer`.
        ConfigError: The user's key can't be read.
    """
    commitment, why = signer(snapshot)
    if not commitment:
        return why
    if owners:
        assert snapshot.signature is not None
        endorsed = endorsement_text(snapshot.name, commitment)
        try:
            endorsement = bytes.fromhex(snapshot.signature.get("endorsement", ""))
        except ValueError:
            endorsement = b""
        is_theirs = any(
            each.data == commitment or each.verifies(endorsement, endorsed) for each in owners
        )
        return "" if is_theirs else "it is signed by another key than its owner's (`owner`)"
    try:
        own = namekey.load(settings).commitment(snapshot.name)
    except ConfigError as error:
        return error.message
    return "" if own == commitment else "it is signed by a key that is not this user's (`owner`)"
