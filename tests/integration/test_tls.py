"""TLS: the recipe of docs/tls.md as it stands there, and what is said of bad certificates."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from safetensors.torch import load_file

from tests.support.certificates import Folder
from tests.support.commands import Command, Run, environment, free_port
from tests.support.daemon import ROOT
from tests.support.tensors import same

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("certificates"))


OWN = {
    "expired": "has expired",
    "foreign": "is not signed by an authority in",
    "nosan": "has no subjectAltName",
    "elsewhere": "does not name 127.0.0.1",
    "client": "lacks serverAuth",
}


def refused(run: Run, *arguments: str, daemon: bool = False, code: int = 5) -> str:
    """What a command says that ends with `code`, on standard error."""
    command = run(*arguments, daemon=daemon)
    assert command.wait(60) == code, command.err
    assert command.err.startswith("error: "), command.err  # nothing of gRPC's before it
    assert "Traceback" not in command.err
    return command.err


@pytest.mark.parametrize("name", OWN)
def test_own_bad_certificates_are_refused_at_the_start(
    run: Run, folder: Folder, checkpoint: Path, name: str
) -> None:
    flags = folder.flags(name)
    said = refused(run, "--listen", "127.0.0.1:0", *flags, daemon=True)
    if name == "elsewhere":
        said += refused(run, "serve", str(checkpoint), "--model", "m", *flags)
    assert f"{name}.pem" in said
    assert said.count(OWN[name]) == said.count("error: ")


def test_keys_and_files_that_do_not_go_together(run: Run, folder: Folder) -> None:
    said = refused(run, "models", *folder.flags("good", key="nosan"))
    assert "nosan.key is not the key of" in said
    assert "does not name" not in refused(
        run,
        "models",
        *folder.flags("elsewhere"),
        "--coordinator",
        f"127.0.0.1:{free_port()}",
        code=3,
    )  # a client needs no name
    assert "expired" in refused(run, "models", *folder.flags("expired"))
    assert "none.pem" in refused(run, "models", *folder.flags("none", key="good"), code=2)
    assert "missing: tls_key, tls_ca" in refused(run, "models", *folder.flags("good")[:2], code=2)


@pytest.fixture
def servers(folder: Folder) -> Iterator[dict[str, str]]:
    """gRPC servers that answer nothing, by the certificate that they show: their addresses. They
    are not mx's, which would not start with these."""
    found: dict[str, str] = {}
    up, over = threading.Event(), threading.Event()

    async def serve() -> None:
        running = []
        for name, authority in (*((name, "ours") for name in OWN), ("good", "theirs"), ("", "")):
            server = grpc.aio.server()
            if name:
                pair = (folder.read(f"{name}.key"), folder.read(f"{name}.pem"))
                ca = folder.read(f"{authority}.pem")
                shown = grpc.ssl_server_credentials([pair], ca, require_client_auth=True)
                port = server.add_secure_port("127.0.0.1:0", shown)
            else:
                port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            running.append(server)
            found[name] = f"127.0.0.1:{port}"
        up.set()
        await asyncio.to_thread(over.wait)
        for server in running:
            await server.stop(0)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert up.wait(60)
        yield found
    finally:
        over.set()
        thread.join()


def test_what_is_wrong_at_the_other_end_is_said_here(
    run: Run, folder: Folder, servers: dict[str, str]
) -> None:
    flags = folder.flags("good")
    expected = {**OWN, "good": "does not accept --tls-cert", "": "answers without TLS"}
    for name, what in expected.items():
        said = refused(run, "models", "--coordinator", servers[name], *flags)
        assert f"the coordinator at {servers[name]}" in said
        assert what in said
    said = refused(run, "pull", "m", "--from", f"peer={servers['elsewhere']}", *flags)
    assert "its certificate does not name 127.0.0.1: it names 10.9.9.9, else.example" in said
    said = refused(run, "models", "--coordinator", servers["good"])
    assert "it requires TLS" in said
    refused(run, "pull", "m", "--from", f"peer={servers['good']}")


def test_who_is_stopped_has_refused_nothing(run: Run, folder: Folder) -> None:
    flags = folder.flags("good")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, since the kernel does that
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "no coordinator answers" in refused(
            run, "models", "--coordinator", address, *flags, code=3
        )


class OverlookedSource(Command):
    """A source that does not look at its own certificate."""

    def command(self, entry: str) -> list[str]:
        code = (
            "import mx.wire.reloading as reloading\n"
            "reloading.check_server_files = lambda *files: None\n"
            "from mx.cli import main; main()"
        )
        return [sys.executable, "-c", code]


def test_the_only_source_has_a_bad_certificate(run: Run, folder: Folder, checkpoint: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = ("--coordinator", address, *folder.flags("good"))
    daemon = run("--listen", address, *folder.flags("good"), daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    serving = ("serve", str(checkpoint), "--model", "m", "--coordinator", address, "--json")
    used = folder.used("good")
    source = OverlookedSource(*serving, *used)
    try:
        source.json()
        folder.used("elsewhere")  # which it shows from now on
        source.until(lambda: "certificates.replaced" in source.err, "its new certificate")
        said = refused(run, "pull", "m", *flags)
        assert "its certificate does not name 127.0.0.1: it names 10.9.9.9, else.example" in said
    finally:
        source.end()


def _blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "tls.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def test_the_recipe_works_as_pasted(checkpoint: Path, tmp_path: Path) -> None:
    """The page's commands in one shell, in an empty folder; only the port is another."""
    shutil.copyfile(checkpoint, tmp_path / "model.safetensors")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, call in {
        "mx": "-c 'from mx.cli import main; main()'",
        "mx-coordinator": "-c 'from mx.cli import coordinator_main; coordinator_main()'",
        "python": "",
    }.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call} "$@"\n')
        program.chmod(stat.S_IRWXU)
    certificates, trial, revoking = _blocks("sh")
    revoking += "\nexport MX_PEER_TLS_CRL=$PWD/tls/crl.pem"  # all but the one that is revoked go on
    (python,) = _blocks("python")
    (tmp_path / "paste.py").write_text(python)
    # Its processes end with the shell, on whichever line it fails.
    script = "\n".join(
        [
            "set -e",
            "trap 'kill $(jobs -p); wait' EXIT",
            certificates,
            revoking,
            trial,
            "python paste.py",
        ]
    )
    port = str(free_port())
    (tmp_path / "paste.py").write_text(python.replace("7600", port))
    done = subprocess.run(
        ["bash", "-c", script.replace("7600", port)],
        cwd=tmp_path,
        env=environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f"{len(load_file(checkpoint))} tensors")
    assert same(load_file(tmp_path / "pulled" / "model.safetensors"), load_file(checkpoint))
