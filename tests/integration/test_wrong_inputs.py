"""Commands that are given something wrong: each says so in its exit code and its one object."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.certificates import Folder
from tests.support.commands import (
    Command,
    Run,
    commands,
    environment,
    free_port,
    serve,
    start_coordinator,
)

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(300)]

#: Takes from root what lets it read and write everything.
_BOUND = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search,-net_bind_service")


class Unprivileged(Command):
    """A command to which permissions mean what they mean to users."""

    def command(self, entry: str) -> list[str]:
        return [*(_BOUND if os.geteuid() == 0 else ()), *super().command(entry)]


def error_of(command: Command, code: int, kind: str) -> dict[str, Any]:
    """Return the error of a command that fails as it should."""
    try:
        assert command.wait(60) == code, command.err
    finally:
        command.end()
    (line,) = command.out.splitlines()
    error: dict[str, Any] = json.loads(line)["error"]
    assert (error["type"], error["exit_code"]) == (kind, code), error
    assert error["message"] and "\n" not in error["message"]
    assert "Traceback" not in command.err and "--debug" not in error["hint"], error
    return error


class Site:
    """A coordinator with the model "small", one with TLS, and a server that is neither."""

    def __init__(self, run: Run, folder: Path, checkpoint: Path) -> None:
        self.checkpoint, self.certificates = checkpoint, Folder(folder)
        self.plain, _ = start_coordinator(run)
        source = serve(run, checkpoint, "small", self.plain)
        self.source = str(source.json()["endpoint"])
        self.secured = f"127.0.0.1:{free_port()}"
        daemon = run("--listen", self.secured, *self.certificates.flags("good"), daemon=True)
        daemon.until(lambda: "listens on" in daemon.err, "the coordinator")
        handler = http.server.BaseHTTPRequestHandler
        self.web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        handler.log_message = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.web.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.web.shutdown()
        self.web.server_close()
        self._thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Site]:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    with commands() as run:
        found = Site(run, tmp_path_factory.mktemp("site"), checkpoint)
        yield found
        found.close()


VERBS = {
    "models": ("models",),
    "sources": ("sources",),
    "plan": ("plan", "small"),
    "pull": ("pull", "small"),
    "serve": ("serve", "CHECKPOINT", "--model", "other"),
    "artifacts": ("artifacts", "list", "small"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("wrong", "code", "kind"),
    [
        ("closed", 3, "CoordinatorError"),
        ("web", 3, "CoordinatorError"),
        ("source", 3, "CoordinatorError"),
        ("name", 3, "CoordinatorError"),
        ("plain", 5, "NotAllowedError"),
        ("tls", 5, "NotAllowedError"),
        ("foreign", 5, "NotAllowedError"),
        ("file", 2, "ConfigError"),
        ("address", 2, "ConfigError"),
        ("beyond", 2, "ConfigError"),
    ],
)
def test_a_wrong_coordinator(
    run: Run, site: Site, verb: str, wrong: str, code: int, kind: str
) -> None:
    good = site.certificates.flags("good")
    given: tuple[str, ...] = {
        "closed": (f"127.0.0.1:{free_port()}",),
        "web": (f"127.0.0.1:{site.web.server_port}",),
        "source": (site.source,),
        "name": ("no-such-host.invalid:7600", "--insecure"),
        "plain": (site.secured,),
        "tls": (site.plain, *good),
        "foreign": (site.secured, *site.certificates.flags("foreign")),
        "file": (site.plain, *site.certificates.flags("none")),
        "address": ("http://127.0.0.1:7600",),
        "beyond": ("192.0.2.1:7600",),
    }[wrong]
    words = [str(site.checkpoint) if word == "CHECKPOINT" else word for word in VERBS[verb]]
    if wrong == "name" and verb == "serve":  # else its own address is refused first
        given += ("--advertise", "192.0.2.1:7600")
    error = error_of(run(*words, "--json", "--coordinator", *given), code, kind)
    if kind != "ConfigError":
        assert error["hint"]


@pytest.fixture
def there(tmp_path: Path, site: Site) -> dict[str, str]:
    """What the arguments below name."""
    for name, mode in (("readonly", 0o555), ("empty", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    for name, mode in (("unreadable", 0o000), ("broken", 0o644)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"\xff" * 100)
        (tmp_path / name / "model.safetensors").chmod(mode)
    return {
        "PORT": str(site.web.server_port),
        "FOLDER": str(tmp_path),
        "AT": f"--coordinator={site.plain}",
        "SOURCE": site.source,
        "CHECKPOINT": str(site.checkpoint),
    }


@pytest.mark.parametrize(
    ("line", "code", "kind"),
    [
        ("pull small AT --out FOLDER/readonly/x", 1, "OutputError"),
        ("pull small AT --out FOLDER/broken/model.safetensors", 2, "ConfigError"),
        ("pull small AT --trace FOLDER/readonly/x", 2, "ConfigError"),
        ("pull small AT --transport rdma", 2, "ConfigError"),
        ("pull small AT --device gpu", 2, "ConfigError"),
        ("pull small AT --slice model.*=0:5/3", 2, "ConfigError"),
        ("pull small AT --slice *.norm.weight=5:0/1", 2, "ConfigError"),
        ("pull small AT --slice *.norm.weight=0:9-3", 2, "ConfigError"),
        ("pull small AT --slice x", 2, "ConfigError"),
        ("pull smal AT", 3, "UnknownModelError"),
        ("pull small:9 AT", 3, "UnknownModelError"),
        ("pull small@zz AT", 2, "ConfigError"),
        ("pull small --from peer=no-such-host.invalid:1 --insecure", 3, "PeerLostError"),
        ("pull small --from disk=FOLDER/unreadable", 2, "ConfigError"),
        ("pull small --from disk=FOLDER/broken", 4, "CheckpointError"),
        ("pull other --from peer=SOURCE", 3, "UnknownModelError"),
        ("serve FOLDER/none AT", 2, "ConfigError"),
        ("serve FOLDER/empty AT", 2, "ConfigError"),
        ("serve FOLDER/unreadable AT", 2, "ConfigError"),
        ("serve FOLDER/broken AT", 4, "CheckpointError"),
        ("serve CHECKPOINT AT --listen 127.0.0.1:PORT", 1, "LocalError"),
        ("serve CHECKPOINT AT --listen 192.0.2.1:0 --insecure", 1, "LocalError"),
        ("serve CHECKPOINT AT --listen 127.0.0.1:1", 1, "LocalError"),
        ("serve --cache --memory 1GB AT --cache-socket FOLDER/readonly/x/y", 5, "NotAllowedError"),
        ("keygen FOLDER/readonly/key", 2, "ConfigError"),
        ("web AT --listen 127.0.0.1:PORT", 1, "LocalError"),
        ("models AT --config FOLDER/unreadable/model.safetensors", 2, "ConfigError"),
        ("daemon --listen 127.0.0.1:0 --state sqlite:FOLDER/readonly/x", 2, "ConfigError"),
        ("daemon --listen 127.0.0.1:0 --state redis://127.0.0.1:1/0", 1, "LocalError"),
        ("daemon --listen 127.0.0.1:PORT", 1, "LocalError"),
    ],
)
def test_a_wrong_argument(there: dict[str, str], line: str, code: int, kind: str) -> None:
    for name, value in there.items():
        line = line.replace(name, value)
    words, daemon = line.split(), line.startswith("daemon")
    error = error_of(Unprivileged(*words[daemon:], "--json", daemon=daemon), code, kind)
    assert error["hint"] or "--config" in line


def test_a_full_disk(run: Run, site: Site, tmp_path: Path) -> None:
    mounted = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("a file system can't be mounted here")
    try:
        at = ("--coordinator", site.plain)
        out = run("pull", "small", *at, "--out", str(tmp_path / "out"), "--json")
        assert error_of(out, 1, "CapacityError")["hint"]
        (tmp_path / "fill").write_bytes(b"x" * (60 << 10))
        state = run("--state", f"sqlite:{tmp_path / 'state'}", "--json", daemon=True)
        assert error_of(state, 1, "LocalError")
        assert not list(tmp_path.glob("out*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("package", ["grpc", "typer", "xxhash"])
def test_a_package_that_is_not_there(package: str, tmp_path: Path, site: Site) -> None:
    absent = f"raise ModuleNotFoundError(\"No module named '{package}'\", name='{package}')"
    (tmp_path / f"{package}.py").write_text(absent)
    there = environment()
    path = f"{tmp_path}{os.pathsep}{there['PYTHONPATH']}"
    command = Unprivileged(
        *("serve", str(site.checkpoint), "--coordinator", site.plain, "--json"),
        env={**there, "PYTHONPATH": path},
    )
    assert error_of(command, 2, "ConfigError")["hint"]
