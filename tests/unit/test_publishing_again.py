"""What a coordinator can have a source publish again, and as what."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mx.core.types import Intent
from mx.namekey import NameKey
from mx.source.registrar import Registrar
from mx.wire.registering import _proved
from tests.support.records import make_documents, make_record, registration

KEY = NameKey(b"k" * 32)
OLD, NEW = make_record(make_documents("A")), make_record(make_documents("B"))


def vouch(record: Any, intent: Intent, *known: bytes) -> bytes:
    asked = replace(registration(record, b"s" * 32), intent=intent)
    return _proved(asked, KEY, b"n" * 32, known)[0].record.vouch


def test_what_gets_another_number_is_dated_as_before() -> None:
    """Also if a coordinator that lies tells of what came later: readers that know that refuse."""
    old = vouch(OLD, Intent())
    new = vouch(NEW, Intent(replaces="main"), old)
    assert vouch(OLD, Intent(replaces="main.2", published_s=5.0), old, new) == old
    assert vouch(OLD, Intent(replaces="main.2"), old, new) not in (old, new)  # its owner's word
    assert vouch(OLD, Intent(publishes=True), old, new) not in (old, new)


def test_a_source_publishes_again_only_what_its_owner_has_published_there() -> None:
    client: Any = None
    held: Any = SimpleNamespace(key=OLD.model, manifest=SimpleNamespace(ref=OLD.ref))
    registrar = Registrar(
        client, {}, lambda _: OLD, lambda _: client, lambda _: 0, lambda _: 0.0, KEY
    )
    registrar._on_outdated(held, "main.2")
    assert not registrar._settling
