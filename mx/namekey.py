"""The name key: who has it owns the names that are bound with it.

A key pair (Ed25519) for each name follows from the key, so that commitments of different names
can't be told to be of one owner. The key itself never leaves the process.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from mx import keyfile
from mx.config import Settings
from mx.core.ownership import certificate_text, statement
from mx.core.types import ManifestRef, ModelKey, SourceRecord
from mx.errors import ConfigError
from mx.log import event

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger(__name__)

_CONTEXT = "mx 2026 name key version 1: the seed of a name's key pair"
_OWNER = "mx 2026 name key version 1: the seed of the owner's key pair"
_KV = "mx 2026 name key version 1: what the names of KV blocks are keyed with"


class NameKey:
    """The key of one owner. Thread-safe."""

    def __init__(self, material: bytes) -> None:
        """
        Args:
            material: The secret, `mx.keyfile.KEY_BYTES` bytes.
        """
        self._material = material
        self._pairs: dict[str, Ed25519PrivateKey] = {}

    def __repr__(self) -> str:
        """Return a text without the secret."""
        return "<NameKey>"

    def _pair(self, name: str, context: str = _CONTEXT) -> Ed25519PrivateKey:
        pair = self._pairs.get(context + name)
        if pair is None:
            # Imported here: most pulls need no key.
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            seed = blake3(self._material + name.encode(), derive_key_context=context).digest()
            pair = self._pairs[context + name] = Ed25519PrivateKey.from_private_bytes(seed)
        return pair

    def commitment(self, name: str) -> bytes:
        """Return the public half of a name's key pair."""
        return self._pair(name).public_key().public_bytes_raw()

    def sign(self, name: str, text: bytes) -> bytes:
        """Return the signature of a text by a name's key pair."""
        return self._pair(name).sign(text)

    def certificate(self, name: str) -> bytes:
        """Return by what this signs for the owner of a name, b"" if it is the owner's key."""
        return b""

    def signs_for(self, key: ModelKey) -> bool:
        """Return True if a source of this model registers with the key."""
        return True

    def kv_secret(self, name: str) -> bytes:
        """Return what the names of a model's KV blocks are keyed with; b"" if this is not for
        them."""
        return blake3(self._material + name.encode(), derive_key_context=_KV).digest()

    @property
    def owner(self) -> bytes:
        """The public half of the owner key, which is the same for all names."""
        return self._pair("", _OWNER).public_key().public_bytes_raw()

    def vouch(
        self, key: ModelKey, ref: ManifestRef, known: Iterable[bytes], now_us: int, *, updates: bool
    ) -> bytes:
        """Return what says that weights are what a name and variant stand for, and since when.

        What has been said of them stands: else old weights would look newer with each start.

        Args:
            key: Of the weights; for an update that of what they replace.
            ref: Theirs.
            known: Vouches of this name and variant, of any sources.
            now_us: The time, in microseconds since 1970.
            updates: They are an update: then they come after all that is known.
        """
        from mx.core.vouching import Vouch, decode, endorsement_text  # pulls need none
        from mx.publickey import is_signed

        own = self.commitment(key.name)
        said = (decode(each, key, is_signed) for each in known)
        found = sorted((v for v in said if v and v.commitment == own), key=lambda v: -v.issued_us)
        for each in found[:1] if updates else found:
            if each.covers(ref):
                return each.encode()
        issued_us = max(now_us, *(each.issued_us + 1 for each in found[:1]), 0)
        endorsement = self._pair("", _OWNER).sign(endorsement_text(key.name, own))
        made = Vouch(issued_us, own, ref.identity, ref.packaging, endorsement)
        return replace(made, signature=self.sign(key.name, made.text(key))).encode()

    def vouched(self, record: SourceRecord) -> bool:
        """Return True if a holder of this key, or of a lender key that it certifies, vouches for a
        source's weights, as what the record's name and variant stand for. It does not matter who
        says so. What was vouched for as an update's is believed of no revision that is not called
        so."""
        from mx.lenderkey import signer  # most pulls need none
        from mx.publickey import is_signed

        model, identity = record.model, record.ref.identity
        texts = {statement(model._replace(revision=""), identity), statement(model, identity)}
        return record.commitment == self.commitment(model.name) and any(
            is_signed(signer(record), record.statement, text) for text in texts
        )


class LenderKey(NameKey):
    """A key that owners of names have certified: it lends what its certificates say."""

    def __init__(
        self,
        seed: bytes,
        certificates: Mapping[str, tuple[bytes, bytes]],
        kv_secrets: Mapping[str, bytes] | None = None,
    ) -> None:
        """
        Args:
            seed: The secret half of its key pair, 32 bytes.
            certificates: By name, the owner's commitment and the certificate.
            kv_secrets: By name, the owner's `kv_secret`, if it is for them.
        """
        super().__init__(seed)
        self._certificates, self._kv_secrets = certificates, kv_secrets or {}

    def _pair(self, name: str, context: str = "") -> Ed25519PrivateKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._material)

    def commitment(self, name: str) -> bytes:
        """Return the commitment of a name's owner, b"" if the key is not for that name."""
        return self._certificates.get(name, (b"",))[0]

    def certificate(self, name: str) -> bytes:
        """Return the certificate for a name."""
        return self._certificates[name][1]

    def signs_for(self, key: ModelKey) -> bool:
        """Return True for a state of an engine's of one of its names: the rest it serves as every
        process may."""
        return key.name in self._certificates and "=" in key.variant

    def kv_secret(self, name: str) -> bytes:
        """Return the owner's, if the key is for KV blocks."""
        return self._kv_secrets.get(name, b"")

    def vouch(self, *_: object, **__: object) -> bytes:
        """Return b"": its holder does not speak for the owner."""
        return b""

    @classmethod
    def issue(
        cls,
        owner: NameKey,
        names: Sequence[str],
        kinds: Sequence[str],
        expires_s: int,
        principal: str = "",
    ) -> bytes:
        """Return the content of the file of a new lender key.

        Args:
            owner: The names' key.
            names: What it is for.
            kinds: What it lends: words of `mx.lenderkey.KINDS`.
            expires_s: Until when, in seconds since 1970.
            principal: Who uses it at a coordinator with TLS; "" for any.
        """
        from mx.lenderkey import Certificate

        seed = os.urandom(keyfile.KEY_BYTES)
        public = cls(seed, {})._pair("").public_key().public_bytes_raw()
        said = Certificate(public, tuple(kinds), expires_s, principal).encode()
        certificates = {
            name: [
                owner.commitment(name).hex(),
                (owner.sign(name, certificate_text(name, said)) + said).hex(),
            ]
            for name in names
        }
        secrets = {name: owner.kv_secret(name).hex() for name in names if "kv" in kinds}
        made = {"seed": seed.hex(), "certificates": certificates, "kv_secrets": secrets}
        return json.dumps(made).encode()

    @classmethod
    def read(cls, path: Path) -> LenderKey:
        """Return the key in a file that `issue` made.

        Raises:
            ConfigError: It can't be read, or is not such a file of this user alone.
        """
        try:
            found = json.loads(keyfile.read(path, 0))
            certificates = {
                str(name): (bytes.fromhex(commitment), bytes.fromhex(certificate))
                for name, (commitment, certificate) in found["certificates"].items()
            }
            if len(seed := bytes.fromhex(found["seed"])) != keyfile.KEY_BYTES:
                raise ValueError
            secrets = found.get("kv_secrets", {})
            return cls(seed, certificates, {str(n): bytes.fromhex(s) for n, s in secrets.items()})
        except OSError as error:
            why = error.strerror or str(error)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            why = "it is none"
        raise ConfigError(
            f"`lender_key`: the key file {path} can't be used: {why}",
            hint="have the owner of the name make one with `mx keygen`",
        )


@functools.cache
def _of_this_process() -> NameKey:
    return NameKey(os.urandom(keyfile.KEY_BYTES))


@functools.cache
def _say_random(why: str) -> None:
    event(
        log,
        "name_key.random",
        level=logging.WARNING,
        text=f"the name key {why}; this process has a random one, so that no other process, and "
        "not this one when it starts again, can update the names that it binds: name a file with "
        "`name_key`",
    )


def load(settings: Settings) -> NameKey:
    """Return the lender key that the settings name, or else the name key, which is made at first
    use.

    Where the default file can't be kept, it is a random key of this process, which is said once.

    Raises:
        ConfigError: The file is not a key file of this user alone.
    """
    if settings.lender_key:
        return LenderKey.read(Path(settings.lender_key))
    named = settings.origin("name_key") if settings.is_set("name_key") else ""
    if not settings.name_key:
        why = f"{named} names no file" if named else "there is no home folder"
        _say_random(f"can't be kept: {why}")
        return _of_this_process()
    key, why = keyfile.kept(Path(settings.name_key), named=named)
    if why:
        _say_random(why)
        return _of_this_process()
    return NameKey(key)
