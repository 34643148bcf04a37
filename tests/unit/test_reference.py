"""How people name models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx import api, codec
from mx.core.reference import ModelReference, parse_reference, pinned_name, with_pin
from mx.core.types import ManifestRef, ModelKey
from mx.errors import ConfigError

PIN = "ab" * 32


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("llama", ModelReference("llama")),
        ("org/llama-8b", ModelReference("org/llama-8b")),
        ("llama:v2", ModelReference("llama", "v2")),
        ("llama:main.2[rank-0]", ModelReference("llama", "main.2", "rank-0")),
        ("llama[rank-0]", ModelReference("llama", "", "rank-0")),
        (f"llama@{PIN}", ModelReference("llama", pin=PIN)),
        (f"llama:v2@{PIN[:8]}", ModelReference("llama", "v2", pin=PIN[:8])),
        ("", ModelReference("")),
    ],
)
def test_a_reference_is_read(text: str, means: ModelReference) -> None:
    assert parse_reference(text) == means


@pytest.mark.parametrize("text", ["llama:", "llama@", ":v2", "@abc", "llama[", "llama[x]y"])
def test_what_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="NAME:REVISION"):
        parse_reference(text)


def test_a_revision_may_stand_in_the_name_or_beside_it_but_not_twice() -> None:
    assert parse_reference("llama", revision="v2").revision == "v2"
    assert parse_reference("llama:v2", revision="v2").revision == "v2"
    with pytest.raises(ConfigError, match="v3"):
        parse_reference("llama:v2", revision="v3")
    with pytest.raises(ConfigError, match="variant"):
        parse_reference("llama[a]", variant="b")


def registrable(key: ModelKey) -> bool:
    try:
        codec.check_model_key(key)
    except ConfigError:
        return False
    return True


TEXT = st.text(st.sampled_from("ab1.:-/[]@ \n"), min_size=1, max_size=8)
# Each filtered by itself: few of three texts are all good.
KEYS = st.builds(
    ModelKey,
    TEXT.filter(lambda text: registrable(ModelKey(text, "main", "checkpoint"))),
    TEXT.filter(lambda text: registrable(ModelKey("a", text, "checkpoint"))),
    TEXT.filter(lambda text: registrable(ModelKey("a", "main", text))),
)


@given(KEYS.filter(registrable))
def test_what_a_key_prints_as_names_it(key: ModelKey) -> None:
    found = parse_reference(str(key))
    assert (found.name, found.revision or "main", found.variant or "checkpoint") == (
        key.name,
        key.revision,
        key.variant,
    )
    assert found.fits_key(key)
    pinned = parse_reference(with_pin(str(key), PIN))
    assert (pinned.name, pinned.variant or "checkpoint", pinned.pin) == (key.name, key.variant, PIN)


def test_a_reference_fits_what_it_names() -> None:
    key, weights = (
        ModelKey("llama", "v2"),
        ManifestRef(bytes.fromhex(PIN), bytes(32), b"", (1, 1, 0)),
    )
    with_files = replace(weights, packaging=b"p" * 32, sizes=(1, 1, 1))
    pin = with_files.pin.hex()
    for text in ("", "llama", "llama:v2", "llama@AB", f"llama:v2[checkpoint]@{PIN}"):
        assert parse_reference(text).fits(key, weights), text
        assert parse_reference(text).fits(key, with_files), text
    for text in ("other", "llama:v1", "llama@cd", "llama[rank-0]", f"llama@{pin}"):
        assert not parse_reference(text).fits(key, weights), text
    assert parse_reference(pinned_name(key, with_files)).fits(key, with_files)
    assert pinned_name(key, with_files) == f"llama@{pin}"
    assert pinned_name(key, weights) == f"llama@{PIN}"
    assert not parse_reference(f"llama@{pin}").fits(key, replace(with_files, packaging=b"q" * 32))


@pytest.mark.parametrize("folder", ["my:model", "llama@v1", "x[rank-0]", "re\x1b[31md"])
def test_a_folders_name_is_not_read_as_a_reference(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match="can't be a model's name"):
        api.serve(tmp_path / folder)
