"""What the coordinator and sources log, in real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from tests.support.commands import Command, Run, environment, serve, start_coordinator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def events(command: Command) -> list[dict[str, Any]]:
    """The lines of standard error, each of which must be an event in JSON."""
    found = [json.loads(line) for line in command.err.splitlines()]
    for line in found:
        assert set(line) == {"ts", "level", "event", "fields"}, line
    return found


def named(command: Command, name: str) -> list[dict[str, Any]]:
    return [line["fields"] for line in events(command) if line["event"] == name]


def test_registrations_readers_refusals_drains_and_stops_are_logged(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    address, daemon = start_coordinator(run, "--json")
    source = serve(run, checkpoint, "m", address)
    endpoint = json.loads(source.out)["endpoint"]
    run("pull", "m", "--coordinator", address, "--no-attach").wait(60)
    source.until(lambda: "reader.ended" in source.err, "end of the read")
    other = tmp_path / "other.safetensors"
    write_checkpoint(other, llama_shapes(1, 64, 128, 256))
    taken = run("serve", str(other), "--model", "m", "--coordinator", address)
    assert taken.wait(60) == 5
    source.signal(signal.SIGTERM)
    assert source.wait(60) == 0
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(60) == 0

    (registered,) = named(daemon, "source.registered")
    assert (registered["model"], registered["endpoint"]) == ("m", endpoint)
    (refused,) = named(daemon, "request.refused")
    assert refused["error"] == "BindingError"
    assert [gone["endpoint"] for gone in named(daemon, "source.gone")] == [endpoint]
    assert named(daemon, "coordinator.stopped")

    (granted,), (ended,) = named(source, "reader.granted"), named(source, "reader.ended")
    assert granted["grant"] == ended["grant"]
    order = [line["event"] for line in events(source) if line["event"].startswith("source.")]
    assert order == ["source.registered", "source.draining", "source.stopped"]


def test_format_and_level_are_settings(run: Run, coordinator: str, checkpoint: Path) -> None:
    at = ("serve", str(checkpoint), "--model", "m", "--coordinator", coordinator)
    quiet = run(*at, "--log-level", "error")
    quiet.until(lambda: "serving m" in quiet.err, "serving")
    assert "source.registered" not in quiet.err
    plain = run(*at, "--json", "--log-format", "text")
    plain.until(lambda: "serving m" in plain.err, "serving")
    assert "INFO mx.source.registrar: source.registered model=m" in plain.err
    asked = run(*at, env=environment(MX_PEER_LOG_FORMAT="json", MX_PEER_LOG_LEVEL="info"))
    asked.until(lambda: "serving m" in asked.err, "serving")
    assert named(asked, "source.registered")
    # Also what a command fails with.
    failed = run("pull", "absent", "--coordinator", coordinator, "--json")
    assert failed.wait(60) == 3
    assert named(failed, "error")[0]["type"] == "UnknownModelError"


def test_a_source_that_never_was_one_does_not_stop(run: Run, coordinator: str) -> None:
    absent = run("serve", "absent", "--model", "m", "--coordinator", coordinator)
    assert absent.wait(60) == 2
    assert absent.err.startswith("error: absent is not there"), absent.err
