"""First use of mx: names, units, hints, reprs, no torch."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import mx
from mx import api, config
from mx.errors import ClosedError, ConfigError, CoordinatorError
from tests.support.commands import Run, environment, free_port, serve
from tests.support.daemon import ROOT
from tests.support.tensors import same

pytestmark = pytest.mark.integration


def test_a_checkpoint_is_served_under_its_folders_name(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    at = ("--coordinator", coordinator)
    source = run("serve", str(checkpoint), *at, "--json")
    assert source.json()["model"] == checkpoint.parent.name
    listed = run("models", *at, "--json").json()["models"]
    assert [entry["model"] for entry in listed] == [checkpoint.parent.name]


def test_name_and_revision_are_understood_wherever_a_name_is(
    run: Run, coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    at: dict[str, Any] = {"coordinator": coordinator, "settings": settings}
    serve(run, checkpoint, "small:v2", coordinator)
    command = run("pull", "small:v2", "--coordinator", coordinator, "--json")
    assert command.json()["model"] == "small:v2"
    identity = mx.list_models(**at)[0].ref.identity.hex()
    for reference in ("small:v2", f"small@{identity[:12]}", f"small:v2@{identity}"):
        with mx.pull(reference, **at) as pull:
            assert pull.wait(30).model == "small:v2"
        assert str(mx.plan(reference, **at).model) == "small:v2"
        assert [str(each.record.model) for each in mx.list_sources(reference, **at)] == ["small:v2"]
        with api.Observer(**at) as observer:
            assert len(observer.look(reference).sources) == 1
        (reach,) = mx.topology(sources=True, model=reference, **at).sources
        assert str(reach.record.model) == "small:v2"
    assert mx.list_sources("small:v1", **at) == []
    with pytest.raises(ConfigError, match="v3"):
        mx.pull("small:v2", revision="v3", **at)
    with pytest.raises(ConfigError, match="pins"):
        mx.serve(checkpoint, model=f"small@{identity}", **at)


def test_a_hangup_ends_no_server(run: Run, checkpoint: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    daemon = run("--listen", address, "--json", daemon=True)
    daemon.json()
    source = serve(run, checkpoint, "small", address)
    for server in (daemon, source):
        server.signal(signal.SIGHUP)
    assert run("pull", "small", "--coordinator", address).wait() == 0
    for server in (source, daemon):
        assert server.process.poll() is None
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


def test_q_ends_top_and_leaves_the_terminal_as_it_was(run: Run, coordinator: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mx", "top", "--coordinator", coordinator],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=environment(TERM="xterm"),
    )
    try:
        shown = b""
        while b"q ends it" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"q")
        deadline_s = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline_s:
            shown += os.read(ours, 4096) if _readable(ours) else b""
        assert process.wait(60) == 0
        assert b"\x1b[?1049l" in shown  # the screen from before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def _readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0.1)[0])


def test_a_coordinator_that_was_named_and_is_not_there_is_why_none_is_embedded(
    run: Run, checkpoint: Path
) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    source = run("serve", str(checkpoint), env=environment(MX_PEER_COORDINATOR=nowhere))
    assert source.wait() == 3
    assert "none is embedded here, since environment MX_PEER_COORDINATOR names one" in source.err
    with pytest.raises(CoordinatorError, match="since `coordinator` names one"):
        mx.serve(checkpoint, coordinator=nowhere, settings=config.load(environ={}))


def _keep(connection: socket.socket) -> None:
    pass


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


#: What something that is not mx does with a connection, and what a user reads of it.
STRANGERS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "mute": (_keep, "it accepted the connection and said nothing"),
    "closing": (socket.socket.close, "it closed the connection"),
    "resetting": (_reset, "it closed the connection"),
    "other protocol": (lambda c: c.sendall(b"SSH-2.0-x\r\n"), "something else listens there"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("asked", ["coordinator", "source"])
def test_no_error_has_words_of_grpc(run: Run, stranger: str, asked: str) -> None:
    answer, says = STRANGERS[stranger]
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    kept.append(server.accept()[0])
                    answer(kept[-1])

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = ["pull", "m", "--from", f"peer={address}"]
        command = run(*(words if asked == "source" else ["models", "--coordinator", address]))
        assert command.wait(60) == 3
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(10)
    for connection in kept:
        connection.close()
    error = command.err.partition("error: ")[2]
    assert says in error and address in error
    assert not re.search("all addresses|UNKNOWN|UNAVAILABLE|ipv4|SETTINGS|recvmsg", error)


def test_a_coordinator_named_by_nothing_is_none(checkpoint: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    settings = config.load({"coordinator": address}, environ={"MX_PEER_COORDINATOR": ""})
    settings = replace(settings, origins={})  # as if it were the default
    with mx.serve(checkpoint, coordinator="", settings=settings) as source:
        assert source.embedded
        assert mx.list_models(coordinator="", settings=settings)[0].sources == 1


def test_load_is_one_line_and_layers_give_their_tensors(
    run: Run, coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    serve(run, checkpoint, "small", coordinator)
    there = load_file(checkpoint)
    loaded = mx.load("small", coordinator=coordinator, settings=settings)
    assert same(loaded, there)
    del loaded

    by_layer: dict[str, torch.Tensor] = {}
    with mx.pull("small", coordinator=coordinator, settings=settings) as pull:
        for layer in pull.layers():
            by_layer |= layer.tensors()
    assert same(by_layer, there)
    with pytest.raises(ClosedError):
        layer.tensors()
    with pytest.raises(ConfigError, match="load"):
        mx.load("small", hold=True)


def test_reprs_are_a_line(
    run: Run, coordinator: str, checkpoint: Path, settings: config.Settings
) -> None:
    serve(run, checkpoint, "small", coordinator)
    with mx.pull("small", coordinator=coordinator, settings=settings) as pull:
        pull.wait()
        reprs = [
            repr(pull),
            repr(mx.plan("small", coordinator=coordinator, settings=settings)),
            *map(repr, mx.list_models(coordinator=coordinator, settings=settings)),
            *map(repr, mx.list_sources(coordinator=coordinator, settings=settings)),
        ]
    assert len(reprs) == 4
    for text in reprs:
        assert "small" in text
        assert len(text) < 200
        assert re.fullmatch(r"<\w+ .*>", text), text


def test_errors_are_there_without_a_call_before() -> None:
    code = "import mx; print(mx.errors.ConfigError.exit_code, mx.errors is mx.errors)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == "2 True\n"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a process in which neither torch nor numpy can be imported."""
    folder = tmp_path / "no-torch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\n"
    )
    env = environment()
    return env | {"PYTHONPATH": f"{folder}{os.pathsep}{env['PYTHONPATH']}"}


def test_without_torch_files_are_served_and_written(
    run: Run, checkpoint: Path, tmp_path: Path, without_torch: dict[str, str]
) -> None:
    address = f"127.0.0.1:{free_port()}"
    run("--listen", address, "--json", daemon=True, env=without_torch).json()
    at = ("--coordinator", address)
    run("serve", str(checkpoint), "--model", "m", *at, "--json", env=without_torch).json()
    out = tmp_path / "out"
    for more in (("--out", str(out)), ("--transport", "tcp")):
        assert run("pull", "m", *at, *more, env=without_torch).wait() == 0
    assert load_file(out / "model.safetensors").keys() == load_file(checkpoint).keys()

    asks = (
        f"mx.load('m', coordinator='{address}')",
        "mx.serve({}, model='x')",
        "mx.broadcast({})",
        f"mx.pull('m', coordinator='{address}').state_dict()",
    )
    for ask in asks:
        code = f"import mx\ntry: {ask}\nexcept mx.errors.ConfigError as error: print(error)"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=without_torch,
            check=True,
        )
        assert "torch is not installed" in done.stdout, done.stderr


def test_values_of_options_complete() -> None:
    def completions(*typed: str) -> list[str]:
        env = environment(
            _MX_COMPLETE="complete_bash",
            COMP_WORDS=" ".join(("mx", *typed)),
            COMP_CWORD=str(len(typed)),
        )
        code = "import sys; sys.argv[0] = 'mx'; from mx.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
        )
        return done.stdout.split()

    assert completions("pull", "m", "--verify", "s") == ["strong"]
    assert {"shm", "tcp", "ucx"} <= set(completions("pull", "m", "--transport", ""))
    assert completions("plan", "m", "--transport", "t") == ["tcp"]
