"""The board of `mx web`, against a dictionary: what a browser gets, however slowly it reads."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mx.operations.web.board import Board

_KINDS = ("source", "pull")


class Browser:
    """What a page does with what it is sent."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._number = self._began = 0
        self.rows: dict[tuple[str, str], Any] = {}
        self.snapshots = 0
        self.received = 0

    def read(self, pages: int = 1 << 30, limit: int = 3) -> None:
        """Read so many pages at most."""
        board = self._board
        if not self._number or board.forgotten > max(self._number, self._began):
            self._number, self._began, self.rows = 0, board.latest, {}
            self.snapshots += 1
        for _ in range(pages):
            page = board.after(self._number, limit)
            if page is None:
                return
            said = json.loads(page.text)
            assert len(said["put"]) + len(said["gone"]) <= limit
            assert page.latest > self._number
            self._number = page.latest
            for kind, row_id, row in said["put"]:
                self.rows[kind, row_id] = row
                self.received += 1
            for kind, row_id in said["gone"]:
                self.rows.pop((kind, row_id), None)


_steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"), st.sampled_from(_KINDS), st.sampled_from("abcdef"), st.integers(0, 3)
        ),
        st.tuples(st.just("drop"), st.sampled_from(_KINDS), st.sampled_from("abcdef"), st.just(0)),
        st.tuples(st.just("read"), st.just(""), st.just(""), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(_steps, st.integers(0, 4))
def test_a_browser_that_reads_to_the_end_has_what_there_is(steps: Any, max_gone: int) -> None:
    board, there = Board(max_gone), dict[tuple[str, str], Any]()
    browser = Browser(board)
    for what, kind, row_id, number in steps:
        key, row = (kind, row_id), {"number": number}
        if what == "put":
            assert board.put(kind, row_id, row) == (there.get(key) != row)
            there[key] = row
        elif what == "drop":
            assert board.drop(kind, row_id) == (there.pop(key, None) is not None)
        else:
            browser.read(number)
    browser.read()
    browser.read()  # a browser that is too far behind begins again at its next read
    assert browser.rows == there
    for kind in _KINDS:
        assert set(board.ids(kind)) == {row_id for each, row_id in there if each == kind}


def test_a_browser_that_does_not_read_costs_nothing_and_gets_the_latest_only() -> None:
    board = Board()
    browser = Browser(board)
    board.put("pull", "a", {"done": 0})
    browser.read()
    for done in range(1, 10_001):
        board.put("pull", "a", {"done": done})
    browser.read()
    assert browser.rows == {("pull", "a"): {"done": 10_000}}
    assert browser.received == 2


def test_what_is_gone_is_forgotten_after_a_while_and_browsers_begin_again() -> None:
    board = Board(max_gone=10)
    slow, late = Browser(board), Browser(board)
    board.put("source", "stays", {})
    slow.read()
    for number in range(100):
        board.put("pull", str(number), {})
        board.drop("pull", str(number))
    assert board.forgotten > 0
    slow.read()
    late.read()
    # It began after what was forgotten, so it need not begin again.
    board.put("source", "new", {})
    late.read()
    assert slow.rows == {("source", "stays"): {}}
    assert late.rows == {("source", "stays"): {}, ("source", "new"): {}}
    assert (slow.snapshots, late.snapshots) == (2, 1)
