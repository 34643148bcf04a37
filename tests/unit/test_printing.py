"""Tables in terminals that are too narrow for them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from mx.cli.printing import NAMES, Column, Plain, table_of
from mx.core.pull_status import PullPhase, PullStatus
from mx.core.types import ModelKey
from mx.operations.verbs.top import render
from mx.wire.listing import SourceStatus
from tests.support.records import make_documents, make_record

ENDPOINT = "192.168.100.100:41001"


def lines_of(shown: object, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(Plain(shown))  # type: ignore[arg-type]
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in lines)
    return lines


MODEL = "meta-llama/Llama-3.3-70B-Instruct:a-revision"
COLUMNS: list[Column[str]] = [
    Column("", "model", lambda _: MODEL, folds=NAMES),
    Column("", "endpoint", lambda endpoint: endpoint),
    Column("", "host", lambda _: "a-long-name-of-a-host", spare=2),
    Column("", "readers", lambda _: 12, right=True, spare=1),
]


def table(endpoint: str, width: int) -> list[str]:
    return lines_of(table_of(COLUMNS, [endpoint], width), width)


def test_columns_are_left_out_before_any_is_cut() -> None:
    head, *_ = table(ENDPOINT, 250)
    assert head.split() == ["model", "endpoint", "host", "readers"]
    head, *rows = table(ENDPOINT, 60)
    assert head.split() == ["model", "endpoint", "readers"]
    assert ENDPOINT in rows[0]
    head, *rows = table(ENDPOINT, 50)
    assert head.split() == ["model", "endpoint"]
    assert ENDPOINT in rows[0]
    assert "".join(row[:27].strip() for row in rows) == MODEL


def test_what_is_longer_than_the_terminal_is_folded() -> None:
    endpoint = "[2001:db8:1234:5678:9abc:def0:1234:5678]:41001"
    _, *rows = table(endpoint, 40)
    found = "".join(row.replace(" ", "") for row in rows)
    assert all(part in found for part in ("2001:db8", "41001", "meta-llama"))


@pytest.mark.parametrize("layers", [2, 126])
def test_top_keeps_model_state_and_rate_at_80_columns(layers: int) -> None:
    from mx.api import Overview

    model = ModelKey("meta-llama/Llama-3.3-70B", "main", "checkpoint")
    pull = PullStatus(
        pull_id="1", model=model, host="a-long-name-of-a-host", pid=123456,
        phase=PullPhase.RUNNING, layers=layers, ready=1, nbytes=141 * 10**9, done_bytes=10**9,
        seconds=12.5, sources=(ENDPOINT,), retries=3, gb_per_s=0.123, requests_port=8000,
        requests_host="",
    )  # fmt: skip
    record = make_record(make_documents("w"), name=model.name, endpoint=ENDPOINT)
    overview = Overview(pulls=(pull,), sources=(SourceStatus(record, 4.0, 2, 0.5),))
    text = "\n".join(lines_of(render(overview, 80), 80))
    for part in (model.name, "running", "123 MB/s", ENDPOINT, "serving", "500 MB/s"):
        assert part in text, text
