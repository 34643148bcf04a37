"""`mx doctor` before fleets of real processes: whole, stopped, killed, cut in two, with TLS."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mx import config
from mx.operations.doctor import CHECKS, Level, examine
from tests.support.certificates import Folder
from tests.support.commands import Run, environment, free_port, serve, start_coordinator
from tests.support.daemon import ROOT
from tests.support.driver.build import MAJORS, why_not
from tests.support.driver.logs import calls
from tests.support.driver.programs import passes

pytestmark = pytest.mark.integration

SCHEMA = json.loads((ROOT / "docs/doctor.schema.json").read_text())
FLEET = [
    word for name in ("coordinators", "models", "sources", "paths") for word in ("--only", name)
]


def doctor(run: Run, *arguments: str, code: int = 0, patience_s: float = 30) -> dict[str, Any]:
    """Run it, and return its object, which is as the schema says.

    `patience_s` is how long it waits for an answer: short where there is none.
    """
    env = environment(MX_PEER_CONNECT_TIMEOUT_S=f"{patience_s:g}")
    command = run("doctor", *arguments, "--json", env=env)
    assert command.wait(100) == code, (command.out, command.err)
    found = command.json()
    jsonschema.Draft202012Validator(SCHEMA).validate(found)
    assert found["ok"] is (code == 0)
    return found


def said(found: dict[str, Any], check: str, level: str) -> str:
    return "\n".join(
        each["text"]
        for each in found["findings"]
        if (each["check"], each["level"]) == (check, level)
    )


def test_this_host_alone(run: Run) -> None:
    found = doctor(run, *(word for name in CHECKS[:-4] for word in ("--only", name)))
    assert "Python 3." in said(found, "python", "ok")
    assert "tcp works" in said(found, "transports", "ok")
    assert found["coordinators"] == found["sources"] == []
    plain = run("doctor", "--quiet", "--only", "python")
    assert (plain.wait(), plain.out, plain.err) == (0, "", "")
    refused = run("doctor", "--only", "nonsense", "--json")
    assert refused.wait() == 2
    assert "the checks are python" in refused.json()["error"]["hint"]


def test_nothing_is_said_in_the_words_of_the_library(run: Run) -> None:
    given = ("--coordinator", f"203.0.113.1:{free_port()}")  # and no certificates
    found = doctor(run, *given, code=1)
    assert "`" not in re.sub("`mx [a-z]+`", "", json.dumps(found))
    assert "--tls-cert" in json.dumps(found)


def test_a_fleet_that_works_and_one_whose_source_stops(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    at = ("--coordinator", coordinator)
    source = serve(run, checkpoint, "small", coordinator)
    endpoint = source.json()["endpoint"]
    found = doctor(run, *at)
    assert found["sources"] == [{"endpoint": endpoint, "answers": True, "error": ""}]
    assert found["coordinators"][0]["sources"] == 1
    assert "1 model and 1 source" in said(found, "models", "ok")
    assert "would read by shm" in said(found, "paths", "ok")
    source.signal(signal.SIGSTOP)
    try:
        found = doctor(run, *at, *FLEET, code=1, patience_s=5)
    finally:
        source.signal(signal.SIGCONT)
    assert endpoint in said(found, "sources", "failure")
    assert found["sources"][0]["answers"] is False
    other = serve(run, checkpoint, "other", coordinator)
    source.signal(signal.SIGSTOP)
    try:
        found = doctor(run, *at, *FLEET, patience_s=5)  # one of two is left
    finally:
        source.signal(signal.SIGCONT)
    assert endpoint in said(found, "sources", "warning")
    other.end()


def test_coordinators_that_are_not_there_or_say_nothing(run: Run) -> None:
    gone = f"127.0.0.1:{free_port()}"
    found = doctor(run, "--coordinator", gone, *FLEET, code=1)
    assert f"no coordinator answers at {gone}" in said(found, "coordinators", "failure")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_at = f"127.0.0.1:{silent.getsockname()[1]}"
        found = doctor(run, "--coordinator", silent_at, *FLEET, code=1, patience_s=3)
        assert silent_at in said(found, "coordinators", "failure")
    found = doctor(run, "--coordinator", "no-such-host.invalid:7600", "--insecure", code=1)
    assert any("check the name" in each["fix"] for each in found["findings"])


def test_another_process_at_a_sources_address(run: Run, coordinator: str, checkpoint: Path) -> None:
    port = str(free_port())
    first = serve(run, checkpoint, "small", coordinator, "--listen", f"127.0.0.1:{port}")
    first.process.kill()
    first.wait()
    alone, _ = start_coordinator(run)
    serve(run, checkpoint, "small", alone, "--listen", f"127.0.0.1:{port}")
    found = doctor(run, "--coordinator", coordinator, *FLEET, code=1)
    assert "another process answers" in said(found, "sources", "failure")


def test_coordinators_that_do_not_share_a_state_are_told_apart(run: Run, checkpoint: Path) -> None:
    first, second = (start_coordinator(run)[0] for _ in range(2))
    serve(run, checkpoint, "small", first)
    # Whatever a flag may say: the check takes all addresses that the setting has.
    patient = {"MX_PEER_CONNECT_TIMEOUT_S": "30"}
    settings = config.load({"coordinator": first}, environ=patient, file="/dev/null")
    object.__setattr__(settings, "coordinator", f"{first},{second}")
    found = examine(settings, only=["coordinators"])
    apart = [each.text for each in found.findings if "does not list" in each.text]
    assert apart == [f"the coordinator at {second} does not list all that another one lists"]
    assert found.ok
    object.__setattr__(settings, "coordinator", f"127.0.0.1:{free_port()},{second}")
    found = examine(settings, only=["coordinators"])
    assert found.findings[0].level is Level.WARNING
    assert "no coordinator answers" in found.findings[0].text
    assert found.ok  # by the other one


def test_with_certificates(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    certificates = Folder(tmp_path)
    good = certificates.flags("good")
    where = f"127.0.0.1:{free_port()}"
    daemon = run("--listen", where, *good, daemon=True)
    daemon.until(lambda: "listens on" in daemon.err, "the coordinator")
    serve(run, checkpoint, "small", where, "--wait", "30", *good)
    found = doctor(run, "--coordinator", where, *good)
    assert found["sources"][0]["answers"]
    # Its files are wrong: it says so, and so does the coordinator.
    found = doctor(run, "--coordinator", where, *certificates.flags("expired"), code=1)
    assert "has expired" in said(found, "certificates", "failure")
    found = doctor(run, "--coordinator", where, *certificates.flags("foreign"), code=1)
    assert "not signed by an authority" in said(found, "certificates", "failure")
    assert said(found, "coordinators", "failure")
    # And without any.
    found = doctor(run, "--coordinator", where, code=1)
    assert "it requires TLS" in said(found, "coordinators", "failure")


@pytest.mark.long
@pytest.mark.skipif(bool(why_not(MAJORS[-1])), reason=why_not(MAJORS[-1]))
def test_gpus_are_seen_and_cuda_is_not_started(tmp_path: Path) -> None:
    """Over the stand-in for the driver, which logs each call."""
    (tmp_path / "log").mkdir()
    code = """
import subprocess
doctor = subprocess.Popen(
    [sys.executable, "-m", "mx", "doctor", "--json"], stdout=subprocess.PIPE, text=True
)
print(doctor.communicate()[0].strip())
print(doctor.pid)
call("cuInit", 0)  # as a process that does start it
"""
    printed, pid = passes(MAJORS[-1], code, LOG=tmp_path / "log")
    found = json.loads(printed)
    assert "GPU" in said(found, "gpus", "ok")
    assert "cuda_ipc works" in said(found, "transports", "ok")
    assert found["ok"]
    assert [name for name, _ in calls(tmp_path / "log")].count("cuInit") == 1
    assert calls(tmp_path / "log", int(pid)) == []
