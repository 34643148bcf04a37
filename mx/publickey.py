"""Public halves of Ed25519 key pairs: the commitments of names, and the signers of artefacts.

Each signature is verified by a `PublicKey`, which only a usable point becomes. For a point of small
order everyone can make signatures in a few tries (RFC 8032, section 5.1.7; Chalkias and others,
"Taming the many EdDSAs"), and a point that is not written in its one form would let one key have
several names.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from mx.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

KEY_BYTES, SIGNATURE_BYTES = 32, 64
KEY_PREFIX = "ed25519:"
_TEXT = re.compile(f"{KEY_PREFIX}([0-9a-f]{{64}})", re.ASCII)

_P = 2**255 - 19
_D = -121665 * pow(121666, -1, _P) % _P
#: The y of a point of order 8. With 0 (order 4), 1 and -1 (orders 1 and 2) and its negative these
#: are the y of all points whose order is small.
_Y_8 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SMALL = frozenset((0, 1, _P - 1, _Y_8, _P - _Y_8))


class PublicKey:
    """A public key with which signatures can be verified. Keys are equal if their bytes are."""

    __slots__ = ("_key", "data")

    def __init__(self, data: bytes) -> None:
        """
        Args:
            data: The key, as RFC 8032 encodes it.

        Raises:
            ConfigError: It is not a public key with a private half; the message says why.
        """
        why = _fault(data)
        if why:
            raise ConfigError(f"{data.hex()[:16]}… is not a public key: {why}")
        self.data = data
        self._key: Ed25519PublicKey | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicKey) and other.data == self.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"<PublicKey {self.data.hex()}>"

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return KEY_PREFIX + self.data.hex()

    def verifies(self, signature: bytes, text: bytes) -> bool:
        """Return True if a text was signed with the private half."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if self._key is None:  # imported here: most pulls verify nothing
            self._key = Ed25519PublicKey.from_public_bytes(self.data)
        try:
            self._key.verify(signature, text)
        except (InvalidSignature, ValueError):
            return False
        return True


def parse(text: str) -> PublicKey:
    """Return the key that a text names.

    Raises:
        ConfigError: It names none.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{text[:80]!r} is not a key: it is {KEY_PREFIX} and 64 hexadecimal digits"
        )
    return PublicKey(bytes.fromhex(found[1]))


@functools.lru_cache(maxsize=4096)
def _fault(data: bytes) -> str:
    """Return why bytes are not a public key, "" if they are one."""
    if len(data) != KEY_BYTES:
        return f"it has {len(data)} bytes, and a key {KEY_BYTES}"
    if len(set(data[1:])) == 1 and data[0] in (data[1], 1):
        return "it is a placeholder"
    number = int.from_bytes(data, "little")
    y = number & (1 << 255) - 1
    if y >= _P:
        return "it is not written in its canonical form"
    if y in _SMALL:
        return "it is a point of small order, for which everyone can sign"
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    if pow(square, (_P - 1) // 2, _P) != 1:
        return "it is not a point of the curve"
    return ""


@functools.lru_cache(maxsize=4096)
def _known(data: bytes) -> PublicKey:
    return PublicKey(data)


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return True if a text was signed with the private half of a public key. False as well if the
    bytes are not a public key."""
    try:
        return _known(public).verifies(signature, text)
    except ConfigError:
        return False
