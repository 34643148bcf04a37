from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest

from mx import trace
from mx.errors import PeerLostError


def test_a_span_without_listeners_costs_no_object() -> None:
    one = trace.span("a", size=1)
    with one as two:
        two.set(more=2)
    assert trace.span("b") is one is two


def test_completed_span_has_duration_by_the_listeners_clock() -> None:
    events: list[trace.SpanEvent] = []
    ticks = itertools.count(100)
    with (
        trace.listening(events.append, clock=lambda: float(next(ticks))),
        trace.span("work", a=1) as span,
    ):
        span.set(b=2)
    started, completed = events
    assert (started.kind, started.name, started.attributes) == ("started", "work", {"a": 1})
    assert (started.at_s, started.duration_s) == (100.0, None)
    assert (completed.kind, completed.attributes) == ("completed", {"a": 1, "b": 2})
    assert (completed.at_s, completed.duration_s) == (101.0, 1.0)
    assert started.span == completed.span


def test_failed_span_carries_the_error_and_lets_it_through() -> None:
    events: list[trace.SpanEvent] = []
    error = PeerLostError("gone", peer="h:1")
    with (
        trace.listening(events.append),
        pytest.raises(PeerLostError) as caught,
        trace.span("read"),
    ):
        raise error
    assert caught.value is error
    assert [event.kind for event in events] == ["started", "failed"]
    assert events[-1].error is error
    assert json.loads(events[-1].to_json())["error"] == "PeerLostError: gone"


def test_two_listeners_and_the_end_of_listening() -> None:
    first: list[trace.SpanEvent] = []
    second: list[trace.SpanEvent] = []
    with trace.listening(first.append):
        with trace.listening(second.append), trace.span("both"):
            pass
        with trace.span("one"):
            pass
    with trace.span("none"):
        pass
    assert [event.name for event in first] == ["both", "both", "one", "one"]
    assert [event.name for event in second] == ["both", "both"]


def test_json_lines_from_many_threads_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"

    def work(number: int) -> None:
        for _ in range(50):
            with trace.span("step", number=number, where=tmp_path):
                pass

    with trace.writing(str(path)):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(records) == 4 * 50 * 2
    assert len({record["span"] for record in records}) == 200
    assert {record["event"] for record in records} == {"started", "completed"}
    assert records[0]["attributes"]["where"] == str(tmp_path)


def test_a_span_that_outlives_the_file_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with trace.writing(str(path)):
        span = trace.span("late")
        span.__enter__()
    span.__exit__(None, None, None)
    assert len(path.read_text().splitlines()) == 1


def test_a_trace_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), trace.writing(str(tmp_path / "no" / "file")):
        pass
