"""Rows of the page: bounded whatever a peer says, and layers grouped without hiding any."""

from __future__ import annotations

import json
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.answers import ModelStatus
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.operations.web.rows import (
    MARKS,
    load_row,
    marks_of_bits,
    marks_of_ranges,
    model_row,
    pull_row,
    source_row,
)
from tests.support.records import make_documents, make_record


def _status(**other: object) -> PullStatus:
    status = PullStatus(
        pull_id=str(uuid.uuid4()),
        model=ModelKey("m"),
        host="host",
        pid=1,
        phase=PullPhase.RUNNING,
        layers=4,
        ready=0b0101,
        nbytes=100,
        done_bytes=50,
        seconds=1.0,
    )
    return status._replace(**other)  # type: ignore[arg-type]


@given(st.integers(0, 1000), st.integers(0))
def test_marks_say_all_only_of_all_and_nothing_only_of_nothing(layers: int, bits: int) -> None:
    bits &= (1 << layers) - 1
    marks = marks_of_bits(bits, layers)
    assert len(marks) <= MARKS
    size = max(1, -(-layers // MARKS))
    for at, mark in enumerate(marks):
        group = [bits >> index & 1 for index in range(at * size, min(layers, (at + 1) * size))]
        assert (mark == "9") == all(group)
        assert (mark == "0") == (not any(group))
    ranges, begin = [], None
    for index in range(layers + 1):
        held = bits >> index & 1
        if held and begin is None:
            begin = index
        if not held and begin is not None:
            ranges.append((begin, index))
            begin = None
    assert marks_of_ranges(ranges, layers) == marks


def test_marks_of_as_many_layers_as_a_peer_may_claim() -> None:
    assert marks_of_bits((1 << 65536) - 1, 65536) == "9" * 120
    held = [(index, index + 1) for index in range(0, 4096, 2)]
    assert set(marks_of_ranges(held, 1_000_000)) <= set("0123456789")


def test_texts_are_short_and_without_control_characters() -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[31m\u202e\n" + "x" * 5000
    row = pull_row(_status(host=hostile, sources=(hostile,) * 3, model=ModelKey(hostile)))
    said = json.dumps(row)
    assert len(said) < 3000
    assert not any(sign in json.loads(said)["host"] for sign in "\x1b\u202e\n")
    assert pull_row(_status())["marks"] == "9090"


def test_a_source_says_what_it_holds() -> None:
    row = source_row(make_record(make_documents("weights")))
    assert (row["role"], row["state"], row["devices"]) == ("origin", "serving", ["host"])
    assert row["held"] == row["layers"] == len(str(row["marks"]))


@pytest.mark.parametrize(("left_s", "shown"), [(5.0, None), (2.6, None), (2.4, 2), (0.0, 0)])
def test_a_lease_is_shown_only_when_it_is_late(left_s: float, shown: int | None) -> None:
    assert load_row(2, 1.23456, left_s, 5.0) == {
        "readers": 2,
        "rate": 1_230_000_000,
        "lease": shown,
    }


def test_weights_are_named_by_the_pin_that_listings_print() -> None:
    record = make_record(make_documents("w"))
    model = ModelStatus(record.model, record.ref, 64, 4, 1)
    assert model.pinned.endswith(str(model_row(model)["pin"]))
    assert str(model_row(model)["pin"]).startswith(str(source_row(record)["pin"]))
