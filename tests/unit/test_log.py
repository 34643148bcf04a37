"""Events as log records, and the lines that commands write for them."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mx import log
from tests.support.log_state import log_as_it_was

LOGGER = logging.getLogger("mx.tests.of_log")


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Undo `set_up`, which changes the whole process, for the other tests."""
    with log_as_it_was():
        yield


def test_events_are_ordinary_records(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mx")
    log.event(LOGGER, "source.registered", model="m", endpoint="[::1]:5", grace_s=0.5)
    log.event(LOGGER, "reader.renewed", level=logging.DEBUG, model="m")
    (record,) = caplog.records
    assert record.getMessage() == "source.registered model=m endpoint=[::1]:5 grace_s=0.5"
    assert record.funcName == "test_events_are_ordinary_records"
    assert isinstance(record.msg, log.Event)
    assert record.msg.fields["model"] == "m"


@pytest.mark.parametrize(
    ("principal", "shown"),
    [
        ("spiffe://a/b", '"spiffe://a/b"'),
        ('a" right="serve', r'"a\" right=\"serve"'),
        ("10.0.0.1", '"10.0.0.1"'),
    ],
)
def test_a_principal_is_quoted_whatever_it_is(principal: str, shown: str) -> None:
    assert str(log.Event("audit.bound", {"principal": principal, "model": "m"})) == (
        f"audit.bound principal={shown} model=m"
    )


@pytest.mark.parametrize("mark", [" ", "\u00a0", "\u3000", '"'])
def test_no_value_looks_like_two_fields(mark: str) -> None:
    said = str(log.Event("audit.bound", {"model": f"m{mark}pin=00"}))
    assert said == f"audit.bound model={json.dumps(f'm{mark}pin=00', ensure_ascii=False)}"


@pytest.mark.parametrize("style", ["text", "json"])
def test_lines(style: str) -> None:
    stream = io.StringIO()
    log.set_up("info", style, stream)
    log.set_up("info", style, stream)  # twice: each line appears once
    log.event(LOGGER, "request.refused", text="red \x1b[31mtext\nand \x7fmore", count=2)
    log.event(LOGGER, "hidden", level=logging.DEBUG)
    logging.getLogger("other.library").info("hidden too")
    LOGGER.warning("plain %s", "words")
    assert "\x1b" not in stream.getvalue()
    first, second = stream.getvalue().splitlines()
    if style == "text":
        assert first.endswith(
            'INFO mx.tests.of_log: request.refused text="red \\u001b[31mtext\\nand more" count=2'
        )
        assert second.endswith("WARNING mx.tests.of_log: plain words")
    else:
        event = json.loads(first)
        assert set(event) == {"ts", "level", "event", "fields"}
        assert (event["level"], event["event"]) == ("info", "request.refused")
        assert event["fields"]["count"] == 2
        assert json.loads(second)["fields"]["text"] == "plain words"


def test_a_throttle_lets_one_line_of_a_cause_through_and_counts_the_others() -> None:
    throttle = log.Throttle(interval_s=10)
    assert [throttle.passes("a", 5.0 + n) for n in range(4)] == [0, None, None, None]
    assert throttle.passes("b", 6.0) == 0
    assert throttle.left_out(14.9) == []
    assert throttle.passes("a", 15.0) == 3
    assert throttle.passes("a", 15.1) is None
    assert throttle.left_out(24.9) == []  # "b" had one line, which passed
    assert throttle.left_out(25.0) == [("a", 1)]
    assert throttle.left_out(99.0) == []
    assert throttle.passes("a", 99.0) == 0


def test_a_throttle_tells_some_causes_apart() -> None:
    throttle = log.Throttle(interval_s=10, most_causes=2)
    assert [throttle.passes(n, 1.0) for n in range(5)] == [0, 0, 0, None, None]
    assert throttle.passes(1, 2.0) is None
    assert throttle.left_out(11.0) == [(1, 1), (None, 2)]


def test_importing_installs_no_handler_and_no_level() -> None:
    """An embedding program decides which records it shows."""
    code = (
        "import logging, mx.api, mx.coordinator.daemon\n"
        "loggers = [logging.getLogger(n) for n in ('', 'mx', 'mx_transports')]\n"
        "print([l.handlers for l in loggers], [l.level for l in loggers[1:]])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[], [], []] [0, 0]"
