"""Public keys: those for which anybody can sign are none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from mx.artifacts.trust import Trust
from mx.errors import ConfigError
from mx.publickey import PublicKey, is_signed
from tests.support.daemon import ROOT

P = 2**255 - 19
#: The base point: the public half of no known key, and R of a signature whose S is 1.
BASE = bytes.fromhex("58" + "66" * 31)
ZERO, ONE = bytes(32), b"\1" + bytes(31)


def encoded(y: int, *, sign: bool = False) -> bytes:
    return (y | sign << 255).to_bytes(32, "little")


def accepted(key: bytes, signature: bytes, text: bytes) -> bool:
    """Whether the library takes a signature, which looks at no key."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, text)
    except InvalidSignature:
        return False
    return True


def forged(key: bytes) -> tuple[bytes, bytes]:
    """Return a signature, and the text that it is of, made without a private key."""
    signature = BASE + ONE
    texts = (f"text {number}".encode() for number in range(200))
    return signature, next(text for text in texts if accepted(key, signature, text))


@pytest.mark.parametrize("key", [ZERO, ONE, encoded(P - 1)], ids=["order 4", "order 1", "order 2"])
def test_a_key_for_which_anybody_signs_is_refused(key: bytes, tmp_path: Path) -> None:
    signature, text = forged(key)
    assert accepted(key, signature, text) and not is_signed(key, signature, text)
    file = tmp_path / "trust.toml"
    file.write_text(f'[[signer]]\nname = "a"\nkey = "ed25519:{key.hex()}"\nmodels = ["*"]\n')
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"placeholder|small order"):
        Trust.load(file)


def test_all_points_of_small_order_are_refused_in_every_form() -> None:
    """The eighth multiple of each is the neutral one; those with y of P and above are the same."""
    y8 = int.from_bytes(
        bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
    )
    for y in (0, 1, P - 1, P, P + 1, y8, P - y8):
        for sign in (False, True):
            with pytest.raises(ConfigError):
                PublicKey(encoded(y, sign=sign))


def test_what_is_no_key_says_why() -> None:
    for data, why in (
        (b"", "it has 0 bytes"),
        (bytes(31), "it has 31 bytes"),
        (ZERO, "placeholder"),
        (ONE, "placeholder"),
        (b"\x11" * 32, "placeholder"),
        (encoded(P + 3), "canonical"),
        (encoded(P - 1), "small order"),
        (encoded(2), "not a point"),
    ):
        with pytest.raises(ConfigError, match=why):
            PublicKey(data)


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=64), st.integers(0, 511))
def test_a_real_key_verifies_what_it_signed_and_nothing_else(
    seed: bytes, text: bytes, bit: int
) -> None:
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public, signature = private.public_key().public_bytes_raw(), private.sign(text)
    key = PublicKey(public)
    assert key == PublicKey(public) and hash(key) == hash(PublicKey(public))
    assert key.verifies(signature, text) and is_signed(public, signature, text)
    changed = bytearray(signature)
    changed[bit // 8] ^= 1 << bit % 8
    assert not key.verifies(bytes(changed), text)
    assert not key.verifies(signature, text + b"!")
    # S + L is the same number: a second form of a signature is none.
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(signature[32:], "little") + order
    assert not key.verifies(signature[:32] + s.to_bytes(32, "little"), text)


def test_public_keys_are_read_in_one_place() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for folder in ("mx", "transports")
        for path in (ROOT / folder).rglob("*.py")
        if "Ed25519PublicKey.from_" in path.read_text()
    ]
    assert found == ["mx/publickey.py"]


def test_random_bytes_are_mostly_no_key_or_one_that_verifies_nothing() -> None:
    for _ in range(64):
        data = os.urandom(32)
        assert not is_signed(data, BASE + ONE, b"text")
