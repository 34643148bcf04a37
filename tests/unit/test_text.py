"""Untrusted text never controls the terminal, and is never read as markup."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file

from mx.cli import outcome
from mx.cli.printing import Plain
from mx.core.layout import TensorSpec, plan_layout
from mx.core.packaging import bad_tensor_name
from mx.core.versions import headers
from mx.errors import CheckpointError, CoordinatorError, ManifestError
from mx.log import TextFormatter
from mx.storage.safetensors import open_checkpoint
from mx.text import has_control, plain, plain_lines
from mx.wire.status import DETAIL_KEY, Remote, Role, _first_line, _rebuild

#: One of each kind: C0, DEL, C1, direction, separators, half a surrogate pair.
BAD = ["\x1b[31m", "\x07", "\x00", "\x08", "\r", "\x7f", "\x9b2J", "\x85", "\u202e", "\u2066"]
BAD += ["\u200f", "\u061c", "\u2028", "\u2029", "\ud800"]
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@pytest.mark.parametrize("bad", BAD)
def test_control_characters_are_found_and_removed(bad: str) -> None:
    assert has_control(f"a{bad}b")
    for cleaned in (plain(f"a{bad}b"), plain_lines(f"a{bad}b")):
        assert STEERS.search(cleaned) is None
        cleaned.encode()


@given(st.text(st.characters()))
def test_plain_text_has_no_control_characters(text: str) -> None:
    assert STEERS.search(plain(text)) is None and "\n" not in plain(text)
    assert STEERS.search(plain_lines(text)) is None
    assert has_control(text) == (plain(text) != text)


@pytest.mark.parametrize("text", ["model.layers.0", "größe", "模型", "a b", "a\u00a0b", "👩‍👧"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert not has_control(text)
    assert plain(text) == plain_lines(text) == text


def test_only_plain_lines_keeps_line_feeds() -> None:
    assert plain("one\ntwo\r\n\tthree") == "one two three"
    assert plain_lines("one\n\ttwo\r\n") == "one\n\ttwo\n"


def test_errors_and_lines(capfd: pytest.CaptureFixture[str]) -> None:
    for bad in BAD:
        outcome.fail(3, "SourceError", f"[red]bad{bad}[/] thing", f"do{bad}", as_json=True)
        outcome.say(f"[bold]a{bad}")
        outcome.write(f"a{bad}b")
    out, err = capfd.readouterr()
    assert STEERS.search(out) is None and STEERS.search(err) is None
    assert "[red]bad" in err and "[bold]a" in err
    objects = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [found["error"]["message"] for found in objects] == [
        f"[red]bad{b}[/] thing" for b in BAD
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_and_live_displays(terminal: bool) -> None:
    table = Table("name")
    for bad in BAD:
        table.add_row(f"[red]x{bad}[/]")
    text = Text.assemble("".join(BAD))
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, highlight=False)
    console.print(Plain(Group(table, text)), markup=False)
    shown = re.sub("\x1b\\[[0-9;]*m" if terminal else "$^", "", file.getvalue())
    assert shown.count("[red]x") == len(BAD)
    assert STEERS.search(shown) is None


def test_log_lines() -> None:
    formatter = TextFormatter()
    for bad in BAD:
        record = logging.LogRecord(f"mx{bad}", 30, "", 1, "said %s\nERROR forged", (bad,), None)
        assert STEERS.search(formatter.format(record)) is None
        assert "\n" not in formatter.format(record)
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        record = logging.LogRecord("mx", 30, "", 1, "failed", (), sys.exc_info())
    assert STEERS.search(formatter.format(record)) is None
    assert "\n" in formatter.format(record)


@pytest.mark.parametrize("bad", BAD)
def test_names_with_control_characters_are_refused_by_serve(bad: str, tmp_path: Path) -> None:
    if bad == "\ud800":
        return  # no header can hold it
    save_file({"fine": torch.zeros(4), f"model{bad}x": torch.zeros(4)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors.* tensor .*model") as caught:
        open_checkpoint(tmp_path / "a.safetensors")
    assert not has_control(str(caught.value)) and "\\" in caught.value.message
    with pytest.raises(ManifestError, match="control character"):
        plan_layout([TensorSpec(f"model{bad}x", "F32", (1,))], ())
    assert bad_tensor_name(f"a{bad}") is not None


@pytest.mark.parametrize("bad", BAD)
def test_errors_of_a_peer_have_no_control_characters(bad: str) -> None:
    detail = json.dumps({"error": "CoordinatorError", "message": f"a{bad}\nb", "hint": f"c{bad}"})
    error = _rebuild(detail.encode(), Remote(Role.COORDINATOR, "127.0.0.1:1"))
    assert isinstance(error, CoordinatorError)
    assert not has_control(error.message) and not has_control(error.hint)
    assert not has_control(_first_line(f"a{bad}b\nc"))


def test_a_hostile_coordinator_on_a_terminal() -> None:
    """A real `mx models` on a terminal, and a coordinator that answers with control characters."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil[red]\nerror: forged"
    detail = {"error": "CoordinatorError", "message": evil, "hint": evil}

    def refuse(request: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata(((DETAIL_KEY, json.dumps(detail).encode()), *headers()))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
        raise AssertionError

    class Everything(grpc.GenericRpcHandler):  # type: ignore[type-arg]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
            return grpc.unary_unary_rpc_method_handler(refuse)

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[Everything()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            for flag in ("", "--json", "--debug"):
                code, shown = on_a_terminal(
                    "models", "--coordinator", f"127.0.0.1:{port}", *filter(None, [flag])
                )
                assert code == 3
                assert "evil[red] error: forged" in shown
                assert (
                    STEERS.search(re.sub("\x1b\\[[0-9;]*m", "", shown).replace("\r\n", "")) is None
                )
                assert "owned" in shown and "\x1b]" not in shown and "\x1b[31m" not in shown[:1]
                assert not any(line.startswith("error: forged") for line in shown.splitlines())
        finally:
            server.stop(None).wait()


def on_a_terminal(*arguments: str) -> tuple[int, str]:
    """Run `mx` on a terminal. Return (exit code, what the terminal received)."""
    ours, theirs = pty.openpty()
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "mx", *arguments],
            stdout=theirs,
            stderr=theirs,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "400"},
        )
        os.close(theirs)
        said = b""
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            said += data
        return child.wait(120), said.decode()
    finally:
        os.close(ours)
