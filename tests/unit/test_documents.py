"""Documents by content: counted, bounded, and dropped a while after their last source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.documents import Documents
from mx.errors import CapacityError
from tests.support.stores import new_store

pytestmark = pytest.mark.usefixtures("each_store")

GRACE_S = 10.0


def store(limit_nbytes: int = 100) -> Documents:
    return Documents(new_store(), limit_nbytes=limit_nbytes, grace_s=GRACE_S)


def test_a_held_document_stays_and_a_released_one_stays_for_its_grace() -> None:
    documents = store()
    documents.put(0, b"k", b"data")
    documents.hold([b"k"])
    documents.hold([b"k"])
    documents.sweep(1000)
    documents.release(1000, [b"k"])
    documents.sweep(2000)
    assert documents.get(b"k") == b"data"
    documents.release(2000, [b"k"])
    documents.sweep(2000 + GRACE_S - 1)
    assert documents.get(b"k") == b"data"
    documents.sweep(2000 + GRACE_S)
    assert documents.get(b"k") is None and documents.used_nbytes == 0


def test_keep_extends_the_grace_of_a_document() -> None:
    documents = store()
    documents.put(0, b"k", b"data")
    assert documents.keep(9, b"k") and not documents.keep(9, b"other")
    documents.sweep(18)
    assert documents.get(b"k") == b"data"


def test_the_limit_counts_reservations() -> None:
    documents = store(40)
    for address in ("a", "b", "c"):
        documents.reserve(10, address)
    documents.reserve(6, "d")
    with pytest.raises(CapacityError, match="36 B of documents, its limit$"):
        documents.put(0, b"k", b"12345", "e")
    documents.unreserve(6, "d")
    documents.put(0, b"k", b"12345", "e")
    documents.put(0, b"k", b"12345", "f")
    assert documents.used_nbytes == 35
    assert documents.used_by("e") == 5 and documents.used_by("f") == 0
    documents.discard([b"k", b"unknown"])
    assert documents.used_nbytes == 30 and len(documents) == 0


def test_an_address_has_its_share_and_half_of_what_is_common() -> None:
    documents = store(1280)  # 10 are reserved for each of 64, and 640 are common
    documents.reserve(324, "a")
    documents.put(0, b"one", b"123456", "a")
    with pytest.raises(CapacityError, match="of a, its limit for one principal"):
        documents.reserve(1, "a")
    with pytest.raises(CapacityError, match="for one principal"):
        documents.put(0, b"two", b"1", "a")
    documents.reserve(330, "b")
    with pytest.raises(CapacityError, match="its limit$"):
        documents.reserve(11, "c")
    documents.reserve(10, "c")  # its own, whoever holds the rest
    documents.unreserve(4, "a")
    documents.put(0, b"two", b"1", "a")
    assert documents.used_by("a") == 327 and documents.used_nbytes == 667


def test_another_holder_pays_once_the_first_one_is_gone() -> None:
    documents = store(40)
    documents.put(0, b"k", b"12345", "a")
    for address in ("", "a", "b"):
        documents.hold([b"k"], address)
    assert documents.used_by("a") == 5
    documents.release(1, [b"k"], "a")
    assert (documents.used_by("a"), documents.used_by("b")) == (0, 5)
    documents.release(2, [b"k"], "b")
    documents.release(2, [b"k"])
    assert documents.used_by("b") == 5
    assert documents.keep(3, b"k", "c")  # who wants it to stay pays
    assert (documents.used_by("b"), documents.used_by("c")) == (0, 5)
    documents.reserve(16, "d")
    assert documents.keep(8, b"k", "d")  # without a share it does not stay for longer
    documents.sweep(3 + GRACE_S)
    assert len(documents) == 0 and documents.used_nbytes == 16


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "hold", "release", "sweep"]),
            st.sampled_from([b"a", b"bb", b"ccc"]),
            st.integers(0, 12),
        )
    )
)
def test_bytes_add_up_and_nothing_held_is_dropped(
    steps: list[tuple[str, bytes, int]],
) -> None:
    documents = store()
    now, holders = 0, dict.fromkeys([b"a", b"bb", b"ccc"], 0)
    for step, key, seconds in steps:
        now += seconds
        if step == "put":
            documents.put(now, key, key)
        elif step == "hold" and documents.get(key):
            documents.hold([key])
            holders[key] += 1
        elif step == "release" and holders[key]:
            documents.release(now, [key])
            holders[key] -= 1
        elif step == "sweep":
            documents.sweep(now)
        kept = [k for k in holders if documents.get(k)]
        assert all(k in kept for k, count in holders.items() if count)
        assert documents.used_nbytes == sum(map(len, kept))
    for key, count in holders.items():
        for _ in range(count):
            documents.release(now, [key])
    documents.sweep(now + GRACE_S)
    assert len(documents) == 0
