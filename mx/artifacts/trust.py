"""The publisher's key and the target's trust file, which decide whose artefacts a target uses.

Artefacts are code. A target takes a set only if its trust file names the key that signed it, for
the model that the set is for and that was asked for:

    revoked = ["6f1c…"]                 # ids of sets, or keys

    [[signer]]
    name = "build farm"
    key = "ed25519:9d61b19deffd5a60…"
    models = ["llama-*"]
    expires = 2027-06-30                # or a time; left out: never
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from google.protobuf.message import DecodeError

from mx import keyfile, trustfile
from mx.artifacts import document as documents
from mx.artifacts.document import Document
from mx.core.artifact_names import ID_CHARS
from mx.errors import ArtifactError, ConfigError, SignerError
from mx.publickey import KEY_BYTES, KEY_PREFIX, SIGNATURE_BYTES, is_signed, parse
from mx.text import has_control, shown
from mx.wire.v1 import artifacts_pb2 as pb

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

#: The most bytes of a signed document.
MAX_SIGNED_BYTES = documents.MAX_DOCUMENT_BYTES + 1024
#: What a signature covers, before the document. No other signature of mx begins so.
_STATEMENT = b"mx artifact set, format 1\0"
_KEY = re.compile(f"{KEY_PREFIX}([0-9a-f]{{64}})", re.ASCII)
_SET_ID = re.compile(f"[0-9a-f]{{{ID_CHARS}}}", re.ASCII)
_SIGNER_FIELDS = {"name", "key", "models", "expires"}


def read_key(path: Path) -> Ed25519PrivateKey:
    """Return a publisher's key.

    Raises:
        ConfigError: The file is missing, is not a key file of this user alone, or can't be read.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        return Ed25519PrivateKey.from_private_bytes(keyfile.read(path))
    except OSError as error:
        raise ConfigError(
            f"the publisher's key {path} can't be read: {error.strerror}",
            hint="make one with `mx artifacts keygen`",
        ) from error


def make_key(path: Path) -> str:
    """Make a publisher's key, and return its public half as a trust file names it.

    Raises:
        ConfigError: There is such a file already, or it can't be kept there.
    """
    try:
        keyfile.make(path)
    except FileExistsError:
        raise ConfigError(
            f"there is a file {path} already", hint="name another: a key is never replaced"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} can't be kept: {error.strerror}", hint="name a file in a folder of yours"
        ) from error
    return shown_key(public_key(read_key(path)))


def public_key(key: Ed25519PrivateKey) -> bytes:
    """Return the public half of a publisher's key."""
    return key.public_key().public_bytes_raw()


def shown_key(public: bytes) -> str:
    """Return a public key as a trust file names it."""
    return KEY_PREFIX + public.hex()


@dataclass(frozen=True)
class SignedDocument:
    """A document with its signature, which was verified. The signer was not."""

    document: Document
    set_id: str
    public_key: bytes
    data: bytes

    @property
    def signer(self) -> str:
        """The signer's key, as a trust file names it."""
        return shown_key(self.public_key)


def sign(document: Document, key: Ed25519PrivateKey) -> SignedDocument:
    """Return a document that is signed.

    Raises:
        ArtifactError: The document is not valid.
    """
    data, public = documents.encode(document), public_key(key)
    found = _encoded(data, public, key.sign(_STATEMENT + data))
    return SignedDocument(document, documents.set_id(data), public, found)


def _encoded(document: bytes, public: bytes, signature: bytes) -> bytes:
    message = pb.SignedArtifact(document=document, public_key=public, signature=signature)
    return message.SerializeToString(deterministic=True)


def read_signed(data: bytes, trust: Trust | None = None) -> SignedDocument:
    """Return the signed document that untrusted bytes encode.

    Args:
        data: The bytes.
        trust: Whose documents are read; None reads those of any signer.

    Raises:
        ArtifactError: They encode none, or the signature is not by the key beside it.
        SignerError: As `Trust.check_signer`.
    """
    if len(data) > MAX_SIGNED_BYTES:
        _refuse(f"its signed document has more than {MAX_SIGNED_BYTES} bytes")
    try:
        message = pb.SignedArtifact.FromString(data)
    except DecodeError:
        _refuse("its signed document is malformed")
    public, signature = message.public_key, message.signature
    if _encoded(message.document, public, signature) != data:
        _refuse("its signed document is not in canonical form")
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        _refuse("its key or signature has another length")
    if not is_signed(public, signature, _STATEMENT + message.document):
        _refuse("its signature is wrong")
    set_id = documents.set_id(message.document)
    if trust is not None:
        trust.check_signer(public, set_id, time.time())
    return SignedDocument(documents.decode(message.document), set_id, public, data)


@dataclass(frozen=True)
class Signer:
    """A key that the trust file names. `expires_s` is in seconds since 1970, None for never."""

    name: str
    models: tuple[str, ...]
    expires_s: float | None


@dataclass(frozen=True)
class Trust:
    """A trust file: the signers by their public keys, and the ids and keys that are revoked."""

    signers: Mapping[bytes, Signer]
    revoked: frozenset[str]

    @classmethod
    def load(cls, path: Path) -> Trust:
        """Read a trust file.

        Raises:
            ConfigError: It is missing, malformed, or other users could write to it or replace it.
        """
        return _parsed(path)

    def check(self, signed: SignedDocument, model: str, now_s: float) -> str:
        """Return the name of the signer, if he may sign sets for a model.

        Args:
            signed: The set's document.
            model: The name that was asked for.
            now_s: The time, in seconds since 1970.

        Raises:
            SignerError: He may not, or the set is for another model.
        """
        signer = self.check_signer(signed.public_key, signed.set_id, now_s)
        which = f"the set {signed.set_id}"
        if signed.document.model != model:
            raise SignerError(
                f"{which} is for the model {shown(signed.document.model)}, not {shown(model)}",
                hint="publish a set for this model",
            )
        if not any(fnmatchcase(model, pattern) for pattern in signer.models):
            raise SignerError(
                f"{which} was signed by {signer.name}, who may not sign sets for {shown(model)}",
                hint="add the model to the signer's `models` in the trust file",
            )
        return signer.name

    def check_signer(self, public: bytes, set_id: str, now_s: float) -> Signer:
        """Return the signer of a set, if the trust file lets him sign any.

        Args:
            public: The public key that signed the set.
            set_id: The set's id.
            now_s: The time, in seconds since 1970.

        Raises:
            SignerError: He may not.
        """
        which, key = f"the set {set_id}", shown_key(public)
        signer = self.signers.get(public)
        if signer is None:
            raise SignerError(
                f"{which} was signed by {key}, which the trust file does not name",
                hint="add the key to the trust file, if you want to run what its owner signs",
            )
        if not self.revoked.isdisjoint((set_id, key)):
            what = "is" if set_id in self.revoked else "was signed by a key that is"
            raise SignerError(
                f"{which} {what} revoked", hint="ask its publisher for another, or go without"
            )
        if signer.expires_s is not None and now_s >= signer.expires_s:
            raise SignerError(
                f"{which} was signed by {signer.name}, whose key has expired",
                hint="change `expires` in the trust file, if you still trust it",
            )
        return signer


def _parsed(path: Path) -> Trust:
    found, _, wrong = trustfile.load(path)
    revoked, entries = found.pop("revoked", []), found.pop("signer", [])
    if found:
        wrong(f"there is no setting {shown(next(iter(found)))}")
    if not _texts(revoked):
        wrong("`revoked` is a list of ids and keys")
    for each in revoked:  # one that is misspelt would revoke nothing
        if not (_SET_ID.fullmatch(each) or _KEY.fullmatch(each)):
            wrong(f"{shown(each)} in `revoked` is neither a set's id nor a key")
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        wrong("signers are written as [[signer]]")
    signers: dict[bytes, Signer] = {}
    for entry in entries:
        if unknown := entry.keys() - _SIGNER_FIELDS:
            wrong(f"a signer has no {shown(min(unknown))}")
        name, models, expires = entry.get("name"), entry.get("models"), entry.get("expires")
        try:
            key = parse(str(entry.get("key")))
        except ConfigError as error:
            wrong(f"the `key` of a signer: {error.message}")
        if not isinstance(name, str) or not name or has_control(name):
            wrong(f"the signer {key} needs a `name`")
        if not models or not _texts(models):
            wrong(f"the signer {shown(name)} needs `models`: a list of names or patterns")
        if key.data in signers:
            wrong(f"{key} is there twice")
        try:
            expires_s = _seconds(expires)
        except ValueError:
            wrong(f"`expires` of {shown(name)} is a date, such as 2027-06-30, or a date and time")
        signers[key.data] = Signer(name, tuple(models), expires_s)
    return Trust(signers, frozenset(revoked))


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _seconds(value: object) -> float | None:
    """Return when a TOML date or time begins, in seconds since 1970. Without a zone it is UTC."""
    if value is None:
        return None
    if not isinstance(value, datetime.date):
        raise ValueError(value)
    if not isinstance(value, datetime.datetime):
        value = datetime.datetime.combine(value, datetime.time())
    if value.tzinfo is None:
        value = value.replace(tzinfo=datetime.UTC)
    return value.timestamp()


def _refuse(what: str) -> NoReturn:
    raise ArtifactError(
        f"a set of artefacts is not valid: {what}", hint="it was not made by `mx artifacts publish`"
    )
