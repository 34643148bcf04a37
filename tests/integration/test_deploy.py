"""What is in deploy/: units and the compose file, against schemas and against mx."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
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
#: The one for trying.
INSECURE = documents(DEPLOY / "compose/insecure.yaml")[0]
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


def test_the_page_installs_what_units_run_before_it_starts_them(tmp_path: Path) -> None:
    page = (ROOT / "docs/deploy.md").read_text().partition("## systemd")[2]
    lines = page.split("```")[1].strip().splitlines()
    steps: dict[str, int] = {}
    for at, line in enumerate(lines):
        steps.setdefault(line.split()[0], at)
    assert steps["python3"] < steps["ln"] < steps["cp"] < steps["systemctl"]
    # What is installed, and where the links are, as the commands say; without the network.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"'\.\[(.+)\]'", lines[steps["python3"]])[0].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()
    for folder in ("opt/mx/bin", "usr/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in project["scripts"]:
        (tmp_path / "opt/mx/bin" / name).symlink_to("/bin/true")
    words = lines[steps["ln"]].split()
    moved = [f"{tmp_path}{each}" if each.startswith("/") else each for each in words]
    subprocess.run(moved, check=True, timeout=30)
    for unit in units():
        assert (tmp_path / started(unit)[0].lstrip("/")).exists(), unit
    for source, _ in re.findall(r"cp (deploy/\S+) (\S+)", "\n".join(lines)):
        assert list(ROOT.glob(source)), source


def environment_of(unit: Path) -> dict[str, str]:
    """Return what a unit sets itself."""
    return dict(re.findall(r"^Environment=(\w+)=(.*)$", unit.read_text(), re.M))


@pytest.mark.parametrize("unit", units(), ids=lambda unit: unit.name)
def test_units_are_closed_by_default(unit: Path, run: Run, tmp_path: Path) -> None:
    given = {name: v for name, v in environment_of(unit).items() if name.startswith("MX_PEER_")}
    closed = {f"MX_PEER_{each}" for each in ("TLS_CERT", "TLS_KEY", "TLS_CA", "POLICY")}
    assert closed <= given.keys()
    program, *words = started(unit)
    words = [str(tmp_path) if word.startswith("/srv/") else word for word in words]
    # The files are not there: it says so, and does not start without them.
    missing = {name: value.replace("/etc/mx", str(tmp_path)) for name, value in given.items()}
    missing |= {"MX_PEER_COORDINATOR_LISTEN": "127.0.0.1:0", "MX_PEER_CACHE_SOCKET": "off"}
    daemon = Path(program).name == "mx-coordinator"
    command = run(*words, daemon=daemon, env=environment(**missing))
    assert command.wait(60) == 2
    assert "tls" in command.err
    drop_in = (DEPLOY / "systemd/insecure.conf").read_text()
    (unset,) = re.findall(r"^UnsetEnvironment=(.+)$", drop_in, re.M)
    assert set(unset.split()) == closed


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


@pytest.mark.parametrize("compose", [COMPOSE, INSECURE], ids=["closed", "insecure"])
def test_the_compose_file_is_what_compose_takes(compose: dict[str, Any]) -> None:
    assert compose_errors(compose) == []
    wrong = copy.deepcopy(compose)
    wrong["services"]["coordinator"]["read_onyl"] = True
    assert compose_errors(wrong) != []
    services = compose["services"]
    assert set(services) == {"redis", "coordinator", "source-a", "source-b", "pull"}
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service["networks"]) <= set(compose["networks"])
        named = {v.split(":")[0] for v in service.get("volumes", ()) if isinstance(v, str)}
        assert {each for each in named if "/" not in each} <= set(compose["volumes"])
        if service["command"][0] in PROGRAMS:
            settings_of(service["command"])


def test_the_compose_file_is_closed() -> None:
    assert "insecure" not in str(COMPOSE)
    for name, service in COMPOSE["services"].items():
        folders = [v for v in service["volumes"] if isinstance(v, str) and v.startswith("./certs")]
        own = "puller" if name == "pull" else name
        assert {each.split(":")[0].split("/")[2] for each in folders} == {own}
        assert all(each.endswith(":ro") for each in folders)
        if name == "redis":
            assert service["command"][1:] == ["/etc/mx/redis.conf"]
            assert "../kubernetes/redis.conf:/etc/mx/redis.conf:ro" in service["volumes"]
        else:
            given = service["environment"]
            assert given["MX_PEER_TLS_CA"] == "/etc/mx/tls/ca.crt"
            assert given["MX_PEER_POLICY"] == "/etc/mx/policy.toml"


def healthy(address: str) -> bool:
    """Return what a probe by gRPC learns, which is not a client of mx."""
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
    services, where = INSECURE["services"], f"127.0.0.1:{free_port()}"
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


@needs_redis
def test_what_the_closed_compose_file_starts_works_together(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """Its commands on loopback, with the files that its script makes."""
    services, where = COMPOSE["services"], f"127.0.0.1:{free_port()}"
    redis_port, certificates = free_port(), tmp_path / "certs"
    subprocess.run([DEPLOY / "compose/certificates", certificates], check=True, timeout=60)

    def here(service: str) -> Any:
        own = certificates / ("puller" if service == "pull" else service)

        def change(word: str) -> str:
            for old, new in (
                ("/etc/mx/tls", str(own)),
                ("/etc/mx/policy.toml", str(DEPLOY / "compose/policy.toml")),
                ("/var/lib/mx", str(tmp_path / service)),
                ("redis:6379", f"127.0.0.1:{redis_port}"),
            ):
                word = word.replace(old, new)
            places = {
                "coordinator:7600": where,
                "localhost:7600": where,
                "0.0.0.0:7600": where,
                "0.0.0.0:7601": "127.0.0.1:0",
                "0.0.0.0:7690": f"127.0.0.1:{free_port()}",
                f"{service}:7601": "",
                "/model": str(checkpoint),
            }
            return places.get(word, word)

        return change

    def settings(service: str) -> dict[str, str]:
        given = dict(services[service]["environment"])
        if "env_file" in services[service]:
            name, _, value = (certificates / "coordinator.env").read_text().strip().partition("=")
            given[name] = value
        return environment(**{name: here(service)(value) for name, value in given.items()})

    def start(service: str, *more: str) -> Any:
        program, *words = changed(services[service]["command"], here(service))
        (tmp_path / service).mkdir(mode=0o700)
        return run(*words, *more, daemon=program == "mx-coordinator", env=settings(service))

    conf = (DEPLOY / "kubernetes/redis.conf").read_text().replace("6379", str(redis_port))
    for old, new in (
        ("/etc/mx/tls", certificates / "redis"),
        ("/etc/mx/acl", certificates / "redis"),
        ("/data", tmp_path),
    ):
        conf = conf.replace(old, str(new))
    (tmp_path / "redis.conf").write_text(f"{conf}\nbind 127.0.0.1\n")
    with redis_running(["redis-server", str(tmp_path / "redis.conf")], redis_port):
        coordinator = start("coordinator")
        coordinator.until(lambda: "listens on" in coordinator.err, "the coordinator")
        _, program, *check = changed(
            services["coordinator"]["healthcheck"]["test"], here("coordinator")
        )
        assert program == "mx-health"
        probe = [sys.executable, str(DEPLOY / "docker/bin/mx-health"), *check]
        asked = subprocess.run(probe, env=settings("coordinator"), check=False, timeout=60)
        assert asked.returncode == 0
        refused = subprocess.run(
            probe, env=environment(), check=False, timeout=60, capture_output=True
        )
        assert refused.returncode != 0  # without a certificate
        sources = [start(name, "--json").json() for name in ("source-a", "source-b")]
        pull = start("pull", "--json")
        assert pull.wait(60) == 0, pull.err
        assert pull.json()["pin"] == sources[0]["pin"]
        # Who may pull may not serve.
        words = ("serve", str(checkpoint), "--model", "demo", "--coordinator", where)
        serving = run(*words, env=settings("pull"))
        assert serving.wait(60) == 5, serving.err


def test_the_image_has_no_more_than_it_needs() -> None:
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert stages[-1] == "scratch"
    bases = (DEPLOY / "docker/bases").read_text()
    for each in stages[:-1]:  # by digest: see the test of the build
        assert re.search(rf"^{each.strip('${}')}=\S+:(?!latest)\S+$", bases, re.M), each
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
    entry = json.loads(next(line[11:] for line in last if line.startswith("ENTRYPOINT ")))
    assert entry == ["/usr/bin/tini", "-s", "--"]
    assert " tini " in (DEPLOY / "docker/system").read_text()


def test_images_are_built_from_digests_alone(tmp_path: Path) -> None:
    """With a `docker` that prints what it is given: no registry is there."""
    shutil.copytree(DEPLOY / "docker", tmp_path / "deploy/docker")
    digest, bases = "sha256:" + "ab" * 32, tmp_path / "deploy/docker/bases"
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && echo {digest} || echo "$@"\n')
    docker.chmod(0o755)

    def build(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [tmp_path / "deploy/docker/build", *words],
            env={"PATH": f"{docker.parent}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )

    text = (DEPLOY / "docker/bases").read_text()
    bases.write_text(re.sub(r"@sha256:[0-9a-f]+", "", text))
    refused = build("-t", "mx")
    assert refused.returncode == 2
    assert "--pin" in refused.stderr
    assert build("--pin").returncode == 0
    pinned = re.findall(r"^[A-Z]+=\S+:\S+@(sha256:[0-9a-f]{64})$", bases.read_text(), re.M)
    assert pinned == [digest] * 3
    assert build("--pin").returncode == 0  # again, from what is pinned
    built = build("-t", "mx")
    assert f"DEBIAN=debian:bookworm-slim@{digest}" in built.stdout
    assert "-f deploy/docker/Dockerfile " in built.stdout
    vllm = build("-f", "deploy/docker/Dockerfile.vllm", "-t", "mx-vllm")
    assert "VLLM=" in vllm.stdout
    assert "DEBIAN=" not in vllm.stdout


def test_locks_have_a_hash_for_each_package_and_no_index() -> None:
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    canonical = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    for path in (
        ROOT / "constraints.lock",
        DEPLOY / "docker/requirements.lock",
        DEPLOY / "docker/build.lock",
    ):
        text = path.read_text()
        assert "://" not in text
        packages = re.findall(r"^(\S+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)
        assert len(packages) == len(re.findall("==", text)) > 3
        for name, version in packages:
            if name in canonical:
                assert canonical[name] == version, (path.name, name)
    locked = set(re.findall(r"^(\S+)==", (ROOT / "constraints.lock").read_text(), re.M))
    assert locked == canonical.keys() - {"torch"}
