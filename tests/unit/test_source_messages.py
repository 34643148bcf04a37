"""The messages of sources, and what the log says of them, where the stream begins again."""

from __future__ import annotations

import logging

import pytest

from mx.coordinator.events import log_changes
from mx.coordinator.listings import SourceMessages
from mx.core.changes import Change, ChangeKind, Tail
from tests.support.records import make_documents, make_record


def test_no_message_of_a_source_that_is_gone_stays_where_the_stream_begins_again() -> None:
    messages, record = SourceMessages(), make_record(make_documents("A"))
    made = messages.source(record)
    assert messages.source(record) is made
    messages.forget_all()
    assert not messages._sources
    assert messages.source(record) == made


def test_sources_that_a_coordinator_finds_do_not_register(caplog: pytest.LogCaptureFixture) -> None:
    up = [Change(ChangeKind.UP, make_record(make_documents(each))) for each in "AB"]
    with caplog.at_level(logging.INFO, "mx"):
        log_changes(Tail(2, up, [], [], begins_again=True))
        assert "source.listed sources=2" in caplog.text and "registered" not in caplog.text
        log_changes(Tail(4, up, [], [], begins_again=False))
        assert caplog.text.count("source.registered") == 2
