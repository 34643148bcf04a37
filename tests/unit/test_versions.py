"""What is read as versions, and what is said of those that differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core import versions
from mx.core.versions import MAX_TEXT_CHARS, SILENT, Versions, decode, mismatch, own
from mx.errors import PeerProtocolError
from mx.wire.versions import VERSIONS_KEY, answered, headers, sent

numbers = st.integers(1, 65_535)
others = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(
        lambda name: name not in ("wire", "layout", "digest")
    ),
    numbers,
    max_size=5,
)


@given(numbers, numbers, numbers, others)
def test_what_is_encoded_is_decoded(
    wire: int, layout: int, digest: int, more: dict[str, int]
) -> None:
    made = Versions(wire, layout, digest, tuple(more.items()))
    text = made.encode()
    assert text.isascii() and text.isprintable()
    if len(text) <= MAX_TEXT_CHARS:
        assert decode(text) == made


near = st.lists(
    st.sampled_from(["wire", "layout", "digest", "other", "=", ",", "1", "2", "0", "65536", " "]),
    max_size=20,
).map("".join)


@given(st.text(max_size=300) | near)
def test_only_what_encode_returns_is_read(text: str) -> None:
    try:
        found = decode(text)
    except PeerProtocolError as error:
        # It is shown, but not at length, and controls no terminal.
        assert len(error.message) < 500 and error.message.isascii() and error.message.isprintable()
        assert mismatch([text]) == error.message
    else:
        assert found.encode() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "wire=2",
        "wire=2,layout=2",
        "layout=2,wire=2,digest=2",
        "wire=2,layout=2,digest=2,",
        "wire=2,layout=2,digest=2,wire=2",
        "wire=2,layout=2,digest=2\n",
        "wire=02,layout=2,digest=2",
        "wire=0,layout=2,digest=2",
        "wire=-2,layout=2,digest=2",
        "wire=65536,layout=2,digest=2",
        "wire=٢,layout=2,digest=2",
        "wire=2, layout=2, digest=2",
        "wire=2,layout=2,digest=2" + ",x=1" * 40,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PeerProtocolError, match="versions that can't be read"):
        decode(text)


def test_a_peer_is_understood_if_it_speaks_the_same() -> None:
    assert mismatch([own().encode()]) is None
    assert sent(headers()) == [own().encode()]


@pytest.mark.parametrize("name", ["WIRE_VERSION", "LAYOUT_VERSION", "DIGEST_VERSION"])
@pytest.mark.parametrize("change", [-1, 1])
def test_any_other_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str, change: int) -> None:
    before, text = str(own()), own().encode()
    monkeypatch.setattr(versions, name, getattr(versions, name) + change)
    assert mismatch([text]) == before != str(own())


def test_what_only_a_newer_peer_has_is_named() -> None:
    assert mismatch(["wire=9,layout=8,digest=7,page=1"]) == "wire 9, layout 8, digest 7, page 1"
    assert mismatch([f"{own().encode()},page=1"]) == f"{own()}, page 1"


def test_a_peer_that_sends_none_is_of_version_1_and_one_that_sends_two_is_not_read() -> None:
    assert mismatch([]) == SILENT
    assert mismatch([own().encode()] * 2) == "versions that can't be read: 2 texts"


def test_an_answer_has_them_ahead_of_it_or_at_its_end() -> None:
    metadata = ((VERSIONS_KEY, "a"), ("other", "b"))
    assert answered(metadata, ((VERSIONS_KEY, "c"),)) == ["a"]
    assert answered((("other", "b"),), metadata) == ["a"]
    assert answered(None, None) == []
