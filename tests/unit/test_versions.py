"""What is read as versions, and what is said of those that differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core import versions
from mx.core.layout_rules import IN_USE_S, RULES, InUse, newest
from mx.core.versions import (
    MAX_TEXT_CHARS,
    SILENT,
    VERSIONS_KEY,
    VersionRange,
    Versions,
    answered,
    decode,
    headers,
    mismatch,
    own,
    sent,
)
from mx.errors import PeerProtocolError

numbers = st.integers(1, 65_535)
spans = st.tuples(numbers, numbers).map(lambda ends: VersionRange(min(ends), max(ends)))
others = st.dictionaries(
    st.from_regex(r"[a-z]{1,8}", fullmatch=True).filter(
        lambda name: name not in ("wire", "layout", "digest", "wiremin", "layoutmin")
    ),
    numbers,
    max_size=5,
)


@given(spans, spans, numbers, others)
def test_what_is_encoded_is_decoded(
    wire: VersionRange, layout: VersionRange, digest: int, more: dict[str, int]
) -> None:
    made = Versions(wire, layout, digest, tuple(more.items()))
    text = made.encode()
    assert text.isascii() and text.isprintable()
    if len(text) <= MAX_TEXT_CHARS:
        assert decode(text) == made


near = st.lists(
    st.sampled_from(
        ["wire", "layout", "digest", "wiremin", "other", "=", ",", "1", "2", "0", "65536", " "]
    ),
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
        "wire=2,layout=2,digest=2,wiremin=2",
        "wire=2,layout=2,digest=2,wiremin=3",
        "wire=2,layout=2,digest=2,wiremin=0",
        "wire=2,layout=2,digest=2,layoutmin=1,wiremin=1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PeerProtocolError, match="versions that can't be read"):
        decode(text)


def test_a_peer_is_understood_if_it_speaks_the_same() -> None:
    assert mismatch([own().encode()]) is None
    assert sent(headers()) == [own().encode()]


def speaks(wire: tuple[int, int], layout: tuple[int, int] = (2, 3), digest: int = 2) -> Versions:
    return Versions(VersionRange(*wire), VersionRange(*layout), digest)


@pytest.mark.parametrize(
    ("one", "other", "understood"),
    [
        (speaks((7, 7)), speaks((7, 8)), True),  # a release and the next one
        (speaks((7, 8)), speaks((8, 9)), True),
        (speaks((7, 8)), speaks((9, 9)), False),
        (speaks((7, 9)), speaks((8, 8)), True),
        (speaks((7, 8), (2, 3)), speaks((7, 8), (3, 4)), True),
        (speaks((7, 8), (2, 2)), speaks((7, 8), (3, 4)), False),
        (speaks((7, 8), digest=2), speaks((7, 8), digest=3), False),  # exact
    ],
)
def test_ranges_that_overlap_are_understood(
    one: Versions, other: Versions, understood: bool
) -> None:
    assert one.understands(other) == other.understands(one) == understood


@pytest.mark.parametrize("name", ["WIRE_VERSION", "DIGEST_VERSION"])
@pytest.mark.parametrize("change", [-1, 1])
def test_any_other_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str, change: int) -> None:
    before, text = str(own()), own().encode()
    monkeypatch.setattr(versions, name, getattr(versions, name) + change)
    if name == "WIRE_VERSION":
        monkeypatch.setattr(versions, "WIRE_MIN_VERSION", versions.WIRE_VERSION)
    assert mismatch([text]) == before != str(own())


def test_an_older_release_reads_what_a_range_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its upper end is under the names that were there before ranges."""
    monkeypatch.setattr(versions, "WIRE_MIN_VERSION", versions.WIRE_VERSION - 1)
    text = own().encode()
    wire, layout = own().wire, own().layout.high
    assert text.startswith(f"wire={wire.high},layout={layout},digest={own().digest},")
    assert text.endswith(f"wiremin={wire.low}") and str(own()).startswith(f"wire {wire}, ")
    assert mismatch([text]) is None


def test_what_only_a_newer_peer_has_is_named() -> None:
    assert mismatch(["wire=9,layout=8,digest=7,page=1"]) == "wire 9, layout 8, digest 7, page 1"
    assert mismatch([f"{own().encode()},page=1"]) is None  # it is not what they differ by


def test_the_layout_that_is_named_is_the_newest_that_all_plan() -> None:
    used = InUse(-2 * IN_USE_S)
    assert used.named(0.0) == newest()
    used.began(newest() - 1)
    assert used.named(1.0) == newest() - 1
    used.began(newest() - 1)
    used.ended(newest() - 1, 10.0)
    assert used.named(10.0 + 2 * IN_USE_S) == newest() - 1  # one call runs
    used.ended(newest() - 1, 20.0)
    assert used.named(20.0 + IN_USE_S) == newest() - 1
    assert used.named(20.1 + IN_USE_S) == newest()


def test_a_coordinator_that_has_just_begun_names_the_oldest_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, newest() + 1, RULES[newest()])
    used = InUse(5.0)
    assert used.named(5.0 + IN_USE_S) == newest() - 1
    assert used.named(5.1 + IN_USE_S) == newest()


def test_two_layout_versions_that_follow_each_other_are_planned_at_most() -> None:
    assert list(RULES) in ([newest()], [newest() - 1, newest()])


def test_a_peer_that_sends_none_is_of_version_1_and_one_that_sends_two_is_not_read() -> None:
    assert mismatch([]) == SILENT
    assert mismatch([own().encode()] * 2) == "versions that can't be read: 2 texts"


def test_an_answer_has_them_ahead_of_it_or_at_its_end() -> None:
    metadata = ((VERSIONS_KEY, "a"), ("other", "b"))
    assert answered(metadata, ((VERSIONS_KEY, "c"),)) == ["a"]
    assert answered((("other", "b"),), metadata) == ["a"]
    assert answered(None, None) == []
