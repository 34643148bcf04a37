"""What a source says of its folder: anything may come from a peer, and is shown or ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mx.core.notes import Notes, adapter_base, decode

_NOTES = Notes({"a.py": "is hidden"}, companions={"b.safetensors": 4}, base="org/base")


def document(**fields: Any) -> bytes:
    return json.dumps(json.loads(_NOTES.encode()) | fields).encode()


def test_the_base_of_an_adapter() -> None:
    assert decode(_NOTES.encode()) == _NOTES
    assert _NOTES.lines()[0] == "adapter of org/base"
    assert _NOTES.to_json()["base"] == "org/base"
    assert "base" not in Notes({"a.py": "is hidden"}).to_json()


def test_a_source_of_an_older_release_names_no_base() -> None:
    older = json.loads(_NOTES.encode())
    del older["base"]
    found = decode(json.dumps(older).encode())
    assert found.base == "" and found.left_out == _NOTES.left_out


def test_what_a_hostile_source_names_as_the_base() -> None:
    assert decode(document(base="\x1b[2Jorg/\u202e\nx")).base == "[2Jorg/ x"
    assert len(decode(document(base="b" * 9000)).base) == 600
    assert decode(document(base=["org/base"])) == Notes()


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"base_model_name_or_path": null}',
        b'{"base_model_name_or_path": ' + b"[" * 99999 + b"]" * 99999 + b"}",
    ],
    ids=["empty", "no text", "a list", "none", "null", "deep"],
)
def test_a_configuration_that_names_no_base(config: bytes) -> None:
    assert adapter_base(config) == ""


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
