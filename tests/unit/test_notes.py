"""What a source says of its folder, as others read it."""

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
