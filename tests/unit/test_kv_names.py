"""Names of KV blocks: equal for equal blocks, and different where anything differs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mx.errors import ConfigError
from mx.kv.names import ID_BYTES, BlockNames, KvKey
from mx.namekey import NameKey

SECRET, IDENTITY = bytes(range(32)), b"i" * 32
FORM = KvKey("vllm", "0.32", "bf16", "2,t,h,d", 4, 8, 2, 16, {"quant": "none"})
tokens = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)


def names_of(form: KvKey = FORM, *shared_with: bytes | str, **given: Any) -> BlockNames:
    said = {"secret": SECRET, "identity": IDENTITY, **given}
    return BlockNames(said["secret"], said["identity"], form, *shared_with)


@given(tokens)
def test_whole_blocks_have_names(prompt: list[int]) -> None:
    names = names_of().of(prompt)
    assert len(names) == len(prompt) // 4
    assert all(len(each) == ID_BYTES for each in names)
    assert len(set(names)) == len(names)  # also of blocks with the same tokens
    assert names == names_of(replace(FORM)).of(tuple(prompt))
    assert names == names_of().of(np.array(prompt, np.int64))  # type: ignore[arg-type]


@given(tokens, st.integers(0, 6))
def test_what_is_known_is_not_hashed_again(prompt: list[int], known: int) -> None:
    names = names_of().of(prompt)
    assert names_of().of(prompt, after=names[:known]) == names
    # More than there are tokens for are left out.
    assert names_of().of(prompt[:8], after=names) == names[:2]


@given(tokens, tokens)
def test_a_block_is_all_tokens_up_to_its_end(one: list[int], other: list[int]) -> None:
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    for at, (a, b) in enumerate(zip(names_of().of(one), names_of().of(other), strict=False)):
        assert (a == b) == (same >= 4 * (at + 1))


def changed(value: Any) -> Any:
    if isinstance(value, str):
        return value + "x"
    return value + 1 if isinstance(value, int) else {**value, "more": "x"}


@pytest.mark.parametrize("field", [each.name for each in fields(KvKey)])
def test_each_field_of_the_form_counts(field: str) -> None:
    other = replace(FORM, **{field: changed(getattr(FORM, field))})
    assert other.encode() != FORM.encode()
    prompt = range(40)
    assert set(names_of(other).of(prompt)).isdisjoint(names_of().of(prompt))


def test_the_order_of_what_is_more_does_not_count() -> None:
    one = replace(FORM, more={"a": "1", "b": "2"})
    assert one.encode() == replace(FORM, more={"b": "2", "a": "1"}).encode()
    with pytest.raises(ConfigError):
        replace(FORM, block_tokens=0)


parts = st.lists(st.one_of(st.binary(max_size=3), st.text(max_size=3)), max_size=3)


@given(parts, parts)
def test_whom_blocks_are_shared_with_counts(one: list[Any], other: list[Any]) -> None:
    equal = [(type(each), each) for each in one] == [(type(each), each) for each in other]
    assert (names_of(FORM, *one).of(range(4)) == names_of(FORM, *other).of(range(4))) == equal


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_secret_and_weights_count(secret: bytes, identity: bytes) -> None:
    assume(secret != SECRET and identity != IDENTITY)
    prompt, own = range(8), names_of().of(range(8))
    assert set(names_of(secret=secret).of(prompt)).isdisjoint(own)
    assert set(names_of(identity=identity).of(prompt)).isdisjoint(own)


@pytest.mark.parametrize("identity", [b"", b"i" * 31, b"i" * 33])
def test_weights_that_are_not_known_have_no_names(identity: bytes) -> None:
    with pytest.raises(ConfigError, match="identity"):
        names_of(identity=identity)


def test_inputs_count_from_their_block_on() -> None:
    prompt = range(12)
    plain, seen = names_of().of(prompt), names_of().of(prompt, {1: b"an image"})
    assert seen[0] == plain[0]
    assert set(seen[1:]).isdisjoint(plain)
    assert names_of().of(prompt, {1: b"another"})[1] not in (seen[1], plain[1])
    assert names_of().of(prompt, {9: b"beyond"}) == plain
    assert names_of().of(prompt, {1: b"an image"}, after=seen[:2]) == seen


def test_each_name_of_an_owner_has_a_secret_of_its_own() -> None:
    key, other = NameKey(b"k" * 32), NameKey(b"o" * 32)
    secrets = {key.kv_secret("a"), key.kv_secret("b"), other.kv_secret("a"), key.commitment("a")}
    assert len(secrets) == 4
    assert NameKey(b"k" * 32).kv_secret("a") == key.kv_secret("a")
