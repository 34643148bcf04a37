"""What a source says of its folder: anything may come from a peer, and is shown or ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mx.core.notes import Notes, decode


def document(**fields: Any) -> bytes:
    empty = {
        "left_out": {},
        "more": 0,
        "repository": "",
        "commit": "",
        "sha256": {},
        "companions": {},
    }
    return json.dumps(empty | fields).encode()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff",
        b"[" * 8000,
        b"[]",
        b"x" * 20_000,
        *[document(more=n) for n in (10**400, -1, 1.5, "1", True, None, float("nan"))],
        *[document(companions={"a": n}) for n in (10**400, 1e308, -1, "1", float("inf"))],
        document(left_out={"is hidden": [1]}),
        document(repository=7),
    ],
)
def test_what_is_malformed_says_nothing(said: bytes) -> None:
    assert decode(said) == Notes()


def test_what_is_said_can_be_shown() -> None:
    said = {"\x1b[31m": ["a\nb", "x" * 9000], "\ud800": ["\udcff"]}
    found = decode(document(left_out=said, companions={"a": (1 << 63) - 1}, more=1 << 62))
    lines = found.lines()
    assert all(line.isprintable() and line.encode() for line in lines)
    assert len("".join(lines)) < 2000
    json.dumps(found.to_json()).encode()
