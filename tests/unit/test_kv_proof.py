"""What a pool tells one reader is sealed: message by message, for holders of the name's key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.errors import NotAllowedError
from mx.kv.proof import Seal
from mx.namekey import NameKey

KEY = NameKey(b"k" * 32)
NONCES = b"r" * 16, b"p" * 16
messages = st.lists(st.binary(max_size=100), max_size=4)


@given(messages)
def test_messages_are_opened_in_their_order(said: list[bytes]) -> None:
    pool, reader = Seal(KEY, "m", NONCES), Seal(KEY, "m", NONCES)
    sealed = [pool.close(each) for each in said]
    assert [reader.open(each) for each in sealed] == said
    assert len(set(sealed)) == len(sealed)  # also of equal messages
    for each in sealed:  # none a second time
        with pytest.raises(NotAllowedError):
            reader.open(each)


@given(st.binary(min_size=1, max_size=50), st.data())
def test_no_bit_is_changed(message: bytes, data: st.DataObject) -> None:
    sealed = bytearray(Seal(KEY, "m", NONCES).close(message))
    at = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[at // 8] ^= 1 << at % 8
    with pytest.raises(NotAllowedError):
        Seal(KEY, "m", NONCES).open(bytes(sealed))


@pytest.mark.parametrize("sealed", [b"", b"t" * 31, b"t" * 32, b"t" * 100])
def test_what_is_not_sealed(sealed: bytes) -> None:
    with pytest.raises(NotAllowedError):
        Seal(KEY, "m", NONCES).open(sealed)


@pytest.mark.parametrize(
    ("key", "name", "nonces"),
    [
        (NameKey(b"o" * 32), "m", NONCES),
        (KEY, "n", NONCES),
        (KEY, "m", (NONCES[1], NONCES[0])),
        (KEY, "m", (NONCES[0], b"q" * 16)),
        (KEY, "m", (NONCES[0] + b"p", NONCES[1][1:])),
    ],
)
def test_keys_names_and_nonces_count(key: NameKey, name: str, nonces: tuple[bytes, bytes]) -> None:
    sealed = Seal(KEY, "m", NONCES).close(b"message")
    with pytest.raises(NotAllowedError):
        Seal(key, name, nonces).open(sealed)
