"""Sets of artefacts for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mx.artifacts import package
from mx.artifacts.document import COMPILE_CACHE, ArtifactFile, Blob, Document
from mx.artifacts.trust import SignedDocument, public_key, shown_key, sign

MADE_S = 1_700_000_000


def document(
    contents: Mapping[str, bytes],
    *,
    model: str = "m",
    environment: Mapping[str, str] | None = None,
    created_s: int = MADE_S,
) -> Document:
    """Return the document of a set that has files with these contents, by path."""
    blobs = {blake3(data).digest(): len(data) for data in contents.values()}
    order = list(blobs)
    files = [
        ArtifactFile(path, order.index(blake3(data).digest()))
        for path, data in sorted(contents.items())
    ]
    described = [Blob(digest, nbytes) for digest, nbytes in blobs.items()]
    return Document(model, COMPILE_CACHE, created_s, dict(environment or {}), described, files)


def write(
    path: Path,
    contents: Mapping[str, bytes],
    key: Ed25519PrivateKey,
    *,
    model: str = "m",
    environment: Mapping[str, str] | None = None,
    created_s: int = MADE_S,
) -> SignedDocument:
    """Write a set's file, and return its document."""
    described = document(contents, model=model, environment=environment, created_s=created_s)
    signed = sign(described, key)
    by_digest = {blake3(data).digest(): data for data in contents.values()}
    package.write(path, signed, [by_digest[blob.blake3] for blob in described.blobs])
    return signed


def write_trust(
    path: Path,
    key: Ed25519PrivateKey,
    *,
    models: Sequence[str] = ("*",),
    expires: str = "",
    revoked: Sequence[str] = (),
) -> Path:
    """Write a trust file that names one signer, "farm", and return its path."""
    text = f"revoked = {list(revoked)}\n[[signer]]\nname = 'farm'\n"
    text += f"key = '{shown_key(public_key(key))}'\nmodels = {list(models)}\n"
    path.write_text(text + (f"expires = {expires}\n" if expires else ""))
    path.chmod(0o600)
    return path
