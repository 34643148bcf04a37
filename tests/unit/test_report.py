"""The error of a pull that ran out of sources."""

from __future__ import annotations

from mx.core.layout import TensorSpec, plan_layout
from mx.errors import (
    EXIT_NOT_ALLOWED,
    DigestError,
    IncompleteError,
    NoSourceError,
    PeerLostError,
    PeerUntrustedError,
    SourceChangedError,
    StaleGenerationError,
)
from mx.fetching.report import PathReport, PullReport, final_error, none_opened

LAYOUT = plan_layout([TensorSpec("model.layers.0.w", "U8", (1000,))])


def test_each_source_is_named_once_for_each_kind_of_failure() -> None:
    error = final_error(
        "m",
        LAYOUT,
        0,
        0,
        [
            PeerLostError("a:1 does not answer", peer="a:1"),
            PeerLostError("b:1 is gone", peer="b:1"),
            PeerLostError("a:1 is gone", peer="a:1"),
            NoSourceError("no other source came within 5 s"),
        ],
    )
    assert type(error) is IncompleteError
    assert error.message.endswith("a:1 is gone; b:1 is gone; no other source came within 5 s")


def test_wrong_bytes_at_last_make_it_an_integrity_error() -> None:
    wrong = DigestError("chunk 0 from a:1 is wrong", peer="a:1", hint="look at it")
    error = final_error("m", LAYOUT, 0, 0, [PeerLostError("b:1 is gone", peer="b:1"), wrong])
    assert isinstance(error, DigestError)
    assert (error.peer, error.hint) == ("a:1", "look at it")


def test_a_pull_that_all_sources_refuse_is_not_allowed() -> None:
    refusal = PeerUntrustedError("a/b may not pull 'm'", peer="a:1")
    closed = PeerLostError("a:1 closed the connection", peer="a:1")
    for causes in ([refusal, closed], [closed, refusal]):
        error = final_error("m", LAYOUT, 0, 0, causes)
        assert type(error) is PeerUntrustedError and error.exit_code == EXIT_NOT_ALLOWED
        assert refusal.message in error.message
        assert type(none_opened("m", causes)) is PeerUntrustedError
    other = PeerLostError("b:1 is gone", peer="b:1")
    assert type(none_opened("m", [refusal, other])) is NoSourceError
    assert type(final_error("m", LAYOUT, 0, 0, [refusal, other])) is IncompleteError


def test_what_a_source_says_of_its_memory_counts_wherever_it_is_noticed_first() -> None:
    said = SourceChangedError("a:1 was written to", peer="a:1", hint="start another source")
    noticed = StaleGenerationError("chunk 7: a:1: its memory has changed", peer="a:1")
    found = [final_error("m", LAYOUT, 0, 0, each) for each in ([said, noticed], [noticed, said])]
    assert {(type(each), each.hint, each.message) for each in found} == {
        (IncompleteError, said.hint, found[0].message)
    }
    assert said.message in found[0].message and noticed.message not in found[0].message


def test_without_a_cause_no_source_was_left() -> None:
    assert "no source was left" in final_error("m", LAYOUT, 0, 0, []).message


def test_a_report_prints_as_one_line() -> None:
    attached = PathReport("shm", "127.0.0.1:7", 2 * 10**9, 0.01, attached=True, pid=12)
    report = PullReport("llama", "aa", "bb", 2 * 10**9, 0.0123, 0.01, 26, "source", [attached])
    assert repr(report) == (
        "<PullReport llama: 2 GB in 12.3 ms by shm-attach from 127.0.0.1:7, "
        "attached, on the word of your own process 12>"
    )
    report.paths = [PathReport("tcp", f"10.0.0.{n}:7", 1, 1.0, rail="ab"[n % 2]) for n in range(9)]
    assert len(repr(report)) < 250 and "and 4 more" in repr(report)


def test_what_was_attached_has_no_rate() -> None:
    attached = PathReport("shm", "127.0.0.1:7", 2 * 10**9, 0.01, attached=True, pid=12)
    report = PullReport("llama", "aa", "bb", 2 * 10**9, 0.5, 0.01, 26, "source", [attached])
    printed = report.to_json()
    assert (printed["gb_per_s"], printed["seconds"]) == (None, 0.5)
    assert [path["pid"] for path in printed["paths"]] == [12]  # type: ignore[attr-defined]
    report.paths = [PathReport("tcp", "127.0.0.1:7", 2 * 10**9, 0.5)]
    assert report.to_json()["gb_per_s"] == 4.0
