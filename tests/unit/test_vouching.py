"""What owners say of their names: what is signed, kept, and said again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mx import trustfile
from mx.coordinator.stores.encoding import decode as stored
from mx.coordinator.stores.encoding import encode
from mx.core.binding import Binding
from mx.core.types import ManifestRef, ModelKey
from mx.core.vouching import END_US, SIZES, Vouch, decode, family, preferred
from mx.errors import ConfigError, ManifestError
from mx.fetching.owners import check
from mx.namekey import NameKey
from mx.publickey import PublicKey, is_signed, parse
from mx.wire.client import LocatedModel
from mx.wire.locate import LocateRequest
from tests.support.owners import commitment_of
from tests.support.records import make_documents, make_record

KEY, OTHER = NameKey(b"a" * 32), NameKey(b"b" * 32)
MODEL = ModelKey("m")
A = ManifestRef(b"a" * 32, b"l" * 32, b"f" * 32, (1, 1, 1))
B = replace(A, identity=b"b" * 32)
BARE = replace(A, packaging=b"", sizes=(1, 1, 0))


def said(
    ref: ManifestRef = A,
    now_us: int = 10,
    *known: bytes,
    key: ModelKey = MODEL,
    updates: bool = False,
) -> bytes:
    return KEY.vouch(key, ref, known, now_us, updates=updates)


def read(data: bytes, key: ModelKey = MODEL) -> Vouch:
    found = decode(data, key, is_signed)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("revision", "root"),
    [
        ("main", "main"),
        ("main.2", "main"),
        ("main.0", "main.0"),
        ("main.1234567890", "main.1234567890"),
        ("v1", "v1"),
        ("v1.3", "v1"),
        ("v1.3.4", "v1.3"),
        (".3", ".3"),
        ("v1.x", "v1.x"),
        ("v1.", "v1."),
    ],
)
def test_a_revision_is_of_a_family(revision: str, root: str) -> None:
    assert family(revision) == root


def test_a_vouch_is_of_one_name_variant_and_family() -> None:
    data = said()
    assert len(data) == max(SIZES) and len(said(BARE)) == min(SIZES)
    assert read(data, MODEL._replace(revision="main.7")) == read(data)
    for other in (ModelKey("n"), MODEL._replace(variant="q"), MODEL._replace(revision="v1")):
        assert decode(data, other, is_signed) is None
    assert decode(b"", MODEL, is_signed) is None
    late = replace(read(data), issued_us=END_US, signature=b"")
    late = replace(late, signature=KEY.sign("m", late.text(MODEL)))
    assert decode(late.encode(), MODEL, is_signed) is None


def test_only_who_knows_the_owner_sees_that_two_names_are_his() -> None:
    vouch = read(said())
    assert vouch.is_by(KEY.owner, "m", is_signed)
    assert vouch.is_by(KEY.commitment("m"), "m", is_signed)
    for owner in (OTHER.owner, OTHER.commitment("m"), KEY.commitment("n"), bytes(32)):
        assert not vouch.is_by(owner, "m", is_signed)
    assert not vouch.is_by(KEY.owner, "n", is_signed)
    other = KEY.vouch(ModelKey("n"), A, (), 10, updates=False)
    for part in (KEY.owner, KEY.commitment("m"), vouch.endorsement):
        assert part not in other


def test_what_was_said_stands_until_an_update() -> None:
    first = said(A, 10)
    assert said(A, 99, first) == first
    second = said(B, 5, first, updates=True)  # by a clock that is behind
    assert read(second).issued_us == 11
    assert said(A, 99, first, second) == first  # it starts again with old weights
    assert said(B, 99, first, second, updates=True) == second  # another process joins the update
    third = said(A, 99, first, second, updates=True)  # back on purpose
    assert read(third).issued_us == 99
    assert read(said(BARE, 1, third)).issued_us == 100  # other files
    # What is not its own, or of another name, says nothing.
    others = OTHER.vouch(MODEL, A, (), 500, updates=False)
    family_of_v1 = said(A, 500, key=MODEL._replace(revision="v1"))
    assert read(said(A, 7, others, family_of_v1, b"junk")).issued_us == 7


def test_a_coordinator_keeps_the_owners_newest_of_the_bound_files() -> None:
    owner = KEY.commitment("m")
    first, later, bare = said(A, 10), said(A, 20), said(BARE, 30)
    others = OTHER.vouch(MODEL, A, (), 40, updates=False)
    for pair, kept in (
        (("", first), first),
        ((first, later), later),
        ((first, bare), first),
        ((bare, first), first),
        ((first, others), first),
        ((others, ""), b""),
        (("", others), b""),
        (("", ""), b""),
    ):
        one, two = (each or b"" for each in pair)
        for each in ((one, two), (two, one)):
            assert preferred(*each, owner, A) == kept  # type: ignore[arg-type]
    assert preferred(first, later, b"", A) == b""


def test_state_that_was_written_before_has_none() -> None:
    record = make_record(make_documents("A"))
    bound = Binding(record.model, record.ref, 1, "a", bound=True, commitment=commitment_of(b"o"))
    assert '"vouch"' not in encode(bound)
    assert stored(encode(bound)).vouch == b""
    bound.vouch = said()
    assert stored(encode(bound)).vouch == bound.vouch


def test_keys_as_text() -> None:
    key = PublicKey(KEY.owner)
    assert parse(str(key)) == key
    for wrong in ("", "ed25519:", str(key)[:-1], str(key) + "0", str(key).upper(), f"{key}\n"):
        with pytest.raises(ConfigError, match="64 hexadecimal digits"):
            parse(wrong)
    for weak in ("0" * 64, "01" + "0" * 62):
        with pytest.raises(ConfigError):
            parse(f"ed25519:{weak}")


def test_trust_files_name_owners(tmp_path: Path) -> None:
    file = tmp_path / "trust.toml"
    key, other = str(PublicKey(KEY.owner)), str(PublicKey(OTHER.owner))
    one = "[[names]]\nname = '{}'\nkey = '{}'\n"
    file.write_text(one.format("llama-*", key) + one.format("llama-8b", other))
    assert list(map(str, trustfile.owners(file, "llama-8b"))) == [key, other]
    assert list(map(str, trustfile.owners(file, "llama-70b"))) == [key]
    assert trustfile.owners(file, "qwen") == ()
    for wrong in (
        "names = 1",
        "[names]\na = 1",
        one.format("", key),
        one.format("m", "ed25519:00"),
        one.format("m", f"ed25519:{'0' * 64}"),
        f"[[names]]\nkey = '{key}'",
        "[[names]]\nname = 'm'",
        one.format("m", key) + "until = 1",
        "[[names]]\nname = 'm'\nkey = 1\n",
        "x",
    ):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=str(file)):
            trustfile.owners(file, "m")
    with pytest.raises(ConfigError, match="can't be read"):
        trustfile.owners(tmp_path / "none", "m")


@pytest.mark.parametrize(
    ("asked", "key", "why"),
    [
        ({}, MODEL, ""),
        ({}, MODEL._replace(revision="main.9"), ""),
        ({"variant": "checkpoint"}, MODEL, ""),
        ({"revision": "main.2"}, MODEL._replace(revision="main.2"), ""),
        ({}, ModelKey("n"), "no valid signature"),
        ({}, MODEL._replace(revision="v1"), "no valid signature"),
        ({"variant": "checkpoint"}, MODEL._replace(variant="q"), "no valid signature"),
        ({"revision": "v1"}, MODEL, "no valid signature"),
        ({"revision": "v1.2"}, MODEL._replace(revision="v1"), ""),
        ({"revision": "v1"}, MODEL._replace(revision="v2"), "no valid signature"),
        ({"name": f"m@{A.identity.hex()}"}, MODEL._replace(revision="v1"), ""),
        ({"name": f"m@{A.identity.hex()}"}, ModelKey("n"), "no valid signature"),
    ],
)
def test_an_answer_is_of_what_was_asked_for(
    asked: dict[str, Any], key: ModelKey, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner has signed each of them, but not as what was asked for."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    where = LocateRequest(**{"name": "m", **asked}, owners=(PublicKey(KEY.owner),))
    found = LocatedModel(key, A, (), vouch=said(key=key))
    if not why:
        check(where, found)
        return
    with pytest.raises(ManifestError, match=why):
        check(where, found)


def test_an_owner_that_serves_the_same_from_two_processes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They date it at different times, and one of them may be the last that is left."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    where = LocateRequest("m", owners=(PublicKey(KEY.owner),))
    for ref, now_us, why in (
        (A, 20, ""), (A, 10, ""), (BARE, 15, ""), (B, 15, "this user has seen"), (B, 30, ""),
        (BARE, 25, "this user has seen"), (A, 25, "this user has seen"),
    ):  # fmt: skip
        found = LocatedModel(MODEL, ref, (), vouch=said(ref, now_us))
        if why:
            with pytest.raises(ManifestError, match=why):
                check(where, found)
            check(replace(where, allow_older=True), found)
            check(replace(where, revision="main"), found)
        else:
            check(where, found)
