"""What is in deploy/: units and the compose file, against schemas and against mx."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mx import api
from tests.support.commands import Command, Run, environment, free_port
from tests.support.daemon import ROOT
from tests.support.deployed import (
    DEPLOY,
    PROGRAMS,
    changed,
    documents,
    settings_of,
    started,
    units,
)
from tests.support.redis_server import needs_redis

pytestmark = pytest.mark.integration

COMPOSE = documents(DEPLOY / "compose/compose.yaml")[0]
#: Of `systemd-analyze security`, in tenths: 0 is closed, 100 is what a unit without a word has.
MOST_EXPOSED = 20

needs_systemd = pytest.mark.skipif(
    not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed"
)


# -- systemd --------------------------------------------------------------------------------------


def analyzed(unit: Path, *verb: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *verb, f"./{unit.name}"],
        cwd=unit.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def installed(unit: Path, folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    """Return a copy of a unit whose program is there."""
    text = re.sub(r"^(ExecStart=)/usr/bin/mx\S*", r"\1/bin/true", unit.read_text(), flags=re.M)
    copied = folder / unit.name
    copied.write_text(text.replace(*change))
    return copied


@needs_systemd
@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_units_are_understood_and_closed(unit: Path, tmp_path: Path) -> None:
    copied = installed(unit, tmp_path)
    verified = analyzed(copied, "verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    exposed = analyzed(copied, "security", "--offline=true", f"--threshold={MOST_EXPOSED}")
    assert exposed.returncode == 0, exposed.stdout
    # Both would say so.
    wrong = installed(unit, tmp_path, ("Type=notify", "Typ=notify"))
    assert "Unknown key" in analyzed(wrong, "verify").stderr
    open_wide = installed(unit, tmp_path, ("SystemCallFilter=", "#"))
    shown = analyzed(open_wide, "security", "--offline=true", "--threshold=10")
    assert shown.returncode != 0


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_units_run_commands_that_there_are(unit: Path) -> None:
    path, *arguments = started(unit)
    assert Path(path).parent == Path("/usr/bin")
    settings_of([Path(path).name, *arguments])
    text = unit.read_text()
    assert "Type=notify" in text
    # 0 to 6 are what mx ends with; wrong settings are no reason to start again.
    (ends,) = re.findall(r"^RestartPreventExitStatus=(.+)$", text, re.M)
    assert "2" in ends.split()
    assert set(ends.split()) <= set("23456")


def test_units_of_different_users_share_no_folder() -> None:
    users: dict[str, set[str]] = {}
    for unit in units():
        given = dict(re.findall(r"^(\w+)=(.+)$", unit.read_text(), re.M))
        users.setdefault(given["StateDirectory"], set()).add(given["User"])
        # Where mx then keeps its keys (`mx.config.state_folder`).
        home = given["Environment"] if "XDG_STATE_HOME" in given["Environment"] else "%S"
        assert home.partition("=")[2].removeprefix("%S").strip("/") in ("", given["StateDirectory"])
    assert all(len(each) == 1 for each in users.values()), users


def test_a_coordinator_runs_where_no_memory_is_written_and_run(run: Run) -> None:
    """As MemoryDenyWriteExecute has it."""
    assert "MemoryDenyWriteExecute=yes" in (DEPLOY / "systemd/mx-coordinator.service").read_text()
    pr_set_mdwe = 65
    code = f"""
import ctypes, os, sys
if ctypes.CDLL(None).prctl({pr_set_mdwe}, 1, 0, 0, 0):
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "mx.cli.coordinator", *sys.argv[1:]])
"""

    class Closed(Command):
        def command(self, entry: str) -> list[str]:
            return [*super().command(entry)[:1], "-c", code]

    address = f"127.0.0.1:{free_port()}"
    closed = Closed("--listen", address, daemon=True, env=environment())
    try:
        closed.until(lambda: "listens on" in closed.err, "the coordinator")
        assert api.list_models(coordinator=address) == []
    except AssertionError:
        if closed.process.poll() == 77:
            pytest.skip("this kernel has no PR_SET_MDWE")
        raise
    finally:
        closed.end()


# -- containers -----------------------------------------------------------------------------------


def compose_errors(document: object) -> list[str]:
    schema = json.loads((ROOT / "tests/support/schemas/compose_spec.json").read_text())
    return [each.message for each in jsonschema.Draft201909Validator(schema).iter_errors(document)]


def test_the_compose_file_is_what_compose_takes() -> None:
    assert compose_errors(COMPOSE) == []
    wrong = copy.deepcopy(COMPOSE)
    wrong["services"]["coordinator"]["read_onyl"] = True
    assert compose_errors(wrong) != []
    services = COMPOSE["services"]
    assert set(services) == {"redis", "coordinator", "source-a", "source-b", "pull"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        named = {v.split(":")[0] for v in service.get("volumes", ()) if isinstance(v, str)}
        assert named <= set(COMPOSE["volumes"])
        if service["command"][0] in PROGRAMS:
            settings_of(service["command"])


def healthy(address: str) -> bool:
    """Return what a probe by gRPC learns, which is no client of mx."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def redis_running(command: list[str], port: int) -> Iterator[None]:
    """Run Redis until the block ends, once it listens."""
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        yield
    finally:
        server.kill()
        server.wait()


@needs_redis
def test_what_compose_starts_works_together(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    """The commands of the compose file, on loopback."""
    services, where = COMPOSE["services"], f"127.0.0.1:{free_port()}"
    redis_port = free_port()

    def changes(service: str) -> Any:
        def change(word: str) -> str:
            places = {
                "coordinator:7600": where,
                "0.0.0.0:7600": where,
                "127.0.0.1:7600": where,
                "0.0.0.0:7601": "127.0.0.1:0",
                "0.0.0.0:7690": f"127.0.0.1:{free_port()}",
                "redis://redis:6379/0": f"redis://127.0.0.1:{redis_port}/0",
                "/model": str(checkpoint),
            }
            if word.startswith("/var/lib/mx"):
                return str(tmp_path / service) + word.removeprefix("/var/lib/mx")
            return places.get(word, word)

        return change

    def start(service: str, *more: str) -> Any:
        program, *words = changed(services[service]["command"], changes(service))
        (tmp_path / service).mkdir(mode=0o700)
        return run(*words, *more, daemon=program == "mx-coordinator")

    with contextlib.ExitStack() as ending:
        own = ("--port", str(redis_port), "--bind", "127.0.0.1", "--dir", str(tmp_path))
        ending.enter_context(redis_running([*services["redis"]["command"], *own], redis_port))
        coordinator = start("coordinator")
        coordinator.until(lambda: "listens on" in coordinator.err, "the coordinator")
        assert healthy(where)
        _, *check = services["coordinator"]["healthcheck"]["test"]
        patient = environment(MX_PEER_CONNECT_TIMEOUT_S="30")
        asked = run(*changed(check, changes("coordinator"))[1:], env=patient)
        assert asked.wait() == 0, asked.out
        sources = [start(name, "--json").json() for name in ("source-a", "source-b")]
        assert all(healthy(each["endpoint"]) for each in sources)
        assert len(api.list_sources("demo", coordinator=where)) == 2
        pull = start("pull", "--json")
        assert pull.wait(60) == 0, pull.err
        assert pull.json()["pin"] == sources[0]["pin"]
        assert list((tmp_path / "pull/demo").glob("*.safetensors"))
        coordinator.end()
        asked = run(*changed(check, changes("coordinator"))[1:])
        assert asked.wait() == 1  # and so it is unhealthy


def test_the_image_has_no_more_than_it_needs() -> None:
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert stages[-1] == "scratch"
    assert all(":" in each and not each.endswith(":latest") for each in stages[:-1])
    last = lines[[i for i, line in enumerate(lines) if line.startswith("FROM ")][-1] :]
    (user,) = [line.split()[1] for line in last if line.startswith("USER ")]
    assert int(user.split(":")[0]) > 0
    assert not any(line.startswith("RUN ") for line in last)  # there is no shell
    assert "torch" not in (DEPLOY / "docker/packages").read_text()
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for copied in (line.removeprefix("!") for line in ignored if line.startswith("!")):
        assert (ROOT / copied).exists(), copied
    command = json.loads(next(line[4:] for line in last if line.startswith("CMD ")))
    assert command[0] in PROGRAMS
