"""Kills, stops, lies, garbage and full disks against the running commands.

Each gets a typed error that says what and where, its exit code, and loses nothing.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mx import api, config
from mx.errors import (
    EXIT_CONFIG,
    EXIT_INCOMPLETE,
    EXIT_INTEGRITY,
    EXIT_NO_SOURCE,
    EXIT_NOT_ALLOWED,
    EXIT_OTHER,
    BindingError,
    CapacityError,
    DigestError,
    IncompleteError,
    MxError,
    NoSourceError,
)
from tests.support.certificates import Folder
from tests.support.commands import Command, Run, free_port, serve, start_coordinator
from tests.support.lying import held_model, offering, with_pages_to_match
from tests.support.outcomes import error_of
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.chaos]

#: Small chunks, so that a pull can be caught in its middle.


def failed(command: Command, code: int, *words: str) -> dict[str, object]:
    """The command ended with `code`, said each of `words`, and showed no traceback."""
    assert command.wait(60) == code, command.err
    for word in words:
        assert word in command.err
    assert "Traceback" not in command.err
    if command.out:
        error = json.loads(command.out)["error"]
        assert error["exit_code"] == code
        assert isinstance(error, dict)
        return error
    return {}


# -- no source ------------------------------------------------------------------------------------


def test_unknown_model(run: Run, coordinator: str) -> None:
    command = run("pull", "nothing", "--coordinator", coordinator, "--json")
    failed(command, EXIT_NO_SOURCE, "nothing")


def test_no_coordinator(run: Run, checkpoint: Path) -> None:
    none_opened = f"127.0.0.1:{free_port()}"
    for arguments in (
        ("pull", "m", "--coordinator", none_opened, "--json"),
        ("serve", str(checkpoint), "--model", "m", "--coordinator", none_opened, "--json"),
        ("models", "--coordinator", none_opened, "--json"),
    ):
        failed(run(*arguments), EXIT_NO_SOURCE, none_opened, "mx-coordinator")


def test_a_source_that_died_just_now(run: Run, coordinator: str, checkpoint: Path) -> None:
    source = serve(run, checkpoint, "m", coordinator)
    source.signal(signal.SIGKILL)
    source.wait()
    # Its lease still runs: it is listed, and does not answer.
    command = run("pull", "m", "--coordinator", coordinator, "--json")
    failed(command, EXIT_NO_SOURCE, "m")


def test_a_source_that_is_stopped_before_the_pull(
    run: Run, coordinator: str, checkpoint: Path
) -> None:
    source = serve(run, checkpoint, "m", coordinator)
    source.signal(signal.SIGSTOP)
    with api.pull("m", coordinator=coordinator) as pull:
        assert isinstance(error_of(pull, 20), NoSourceError)


# -- in the middle --------------------------------------------------------------------------------


#: So fast that a pull of the large checkpoint takes two seconds.
SLOWLY = ("--max-bandwidth", "200MB/s")


def interrupted(pull: api.Pull, source: Command, number: int) -> MxError:
    """Send the source a signal once a layer is ready. Returns the pull's error."""
    next(pull.layers())
    source.signal(number)
    return error_of(pull, 60)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_source_killed_in_mid_pull(
    run: Run,
    coordinator: str,
    large_checkpoint: Path,
    transport: str,
    settings: config.Settings,
) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, *SLOWLY)
    patient = replace(settings, stall_timeout_s=600.0)  # it is not silence that ends the pull
    with api.pull(
        "m", coordinator=coordinator, transport=transport, attach=False, settings=patient
    ) as pull:
        error = interrupted(pull, source, signal.SIGKILL)
    assert isinstance(error, IncompleteError)
    assert error.exit_code == EXIT_INCOMPLETE
    assert " of 34 layers, " in str(error)


def test_a_source_stopped_in_mid_pull(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, *SLOWLY)
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        error = interrupted(pull, source, signal.SIGSTOP)
    assert isinstance(error, IncompleteError)
    assert "of 34 layers" in str(error)


def test_another_source_takes_over(run: Run, coordinator: str, large_checkpoint: Path) -> None:
    sources = [serve(run, large_checkpoint, "m", coordinator, *SLOWLY) for _ in range(2)]
    with api.pull("m", coordinator=coordinator, transport="tcp") as pull:
        next(pull.layers())
        by_endpoint = {source.json()["endpoint"]: source for source in sources}
        first = pull.progress().sources[0]
        by_endpoint[first].signal(signal.SIGKILL)
        report = pull.wait(60)
        assert same(pull.state_dict(), load_file(large_checkpoint))
    assert len(report.paths) == 2
    assert report.retries > 0


def test_a_coordinator_killed_in_mid_pull_is_not_missed(run: Run, large_checkpoint: Path) -> None:
    address, coordinator = start_coordinator(run)
    source = serve(run, large_checkpoint, "m", address, *SLOWLY)
    with api.pull("m", coordinator=address, transport="tcp") as pull:
        next(pull.layers())
        source.signal(signal.SIGSTOP)
        coordinator.signal(signal.SIGKILL)
        coordinator.wait()
        source.signal(signal.SIGCONT)
        assert pull.wait(30).layers == 34
        assert same(pull.state_dict(), load_file(large_checkpoint))


# -- lies -----------------------------------------------------------------------------------------


def flip(view: memoryview) -> None:
    view[5 << 20] ^= 0x10


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_wrong_bytes_are_found(coordinator: str, transport: str) -> None:
    held = held_model("liar", corrupt=flip)
    with (
        offering(held, coordinator) as endpoint,
        api.pull("liar", coordinator=coordinator, transport=transport, attach=False) as pull,
    ):
        error = error_of(pull)
        assert isinstance(error, DigestError)
        assert error.exit_code == EXIT_INTEGRITY
        assert error.peer == endpoint
        assert "model.layers.2" in str(error)
        with pytest.raises(DigestError):
            pull.state_dict()


def test_wrong_bytes_in_attached_memory_are_found_when_asked_for(coordinator: str) -> None:
    with offering(held_model("liar", corrupt=flip), coordinator):
        with api.pull("liar", coordinator=coordinator) as pull:
            assert pull.wait(30).verified == "source"
        with api.pull("liar", coordinator=coordinator, verify="strong") as pull:
            assert isinstance(error_of(pull), DigestError)


@pytest.mark.parametrize(
    "options", [{"transport": "tcp"}, {"transport": "tcp", "verify": "strong"}]
)
def test_a_lie_with_block_digests_to_match_is_found_by_the_identity(
    coordinator: str, options: dict[str, str]
) -> None:
    with offering(with_pages_to_match(held_model("liar", corrupt=flip)), coordinator) as endpoint:
        with api.pull("liar", coordinator=coordinator, **options) as pull:  # type: ignore[arg-type]
            error = error_of(pull)
        assert isinstance(error, DigestError)
        assert error.peer == endpoint
        assert "identity" in str(error)


def test_another_model_under_a_taken_name(
    run: Run, coordinator: str, checkpoint: Path, large_checkpoint: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    thief = run(
        "serve", str(large_checkpoint), "--model", "m", "--coordinator", coordinator, "--json"
    )
    error = failed(thief, EXIT_NOT_ALLOWED, "m")
    assert error["type"] == BindingError.__name__
    with api.pull("m", coordinator=coordinator) as pull:
        assert pull.wait(30).layers == 10


# -- hostile input --------------------------------------------------------------------------------


def safetensors_bytes(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HOSTILE = {
    "empty file": b"",
    "no header": b"\x10\0\0\0\0\0\0\0{}",
    "truncated": safetensors_bytes({"a": entry([8], 0, 8)}, b"1234"),
    "huge header length": safetensors_bytes({"a": entry([1], 0, 1)}, b"1", length=1 << 60),
    "not JSON": safetensors_bytes(b"{nope", b""),
    "no tensors": safetensors_bytes({}),
    "only metadata": safetensors_bytes({"__metadata__": {"format": "pt"}}),
    "duplicate keys": safetensors_bytes(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"1",
    ),
    "dots in a name": safetensors_bytes({"../../etc/x": entry([1], 0, 1)}, b"1"),
    "NUL in a name": safetensors_bytes({"a\0b": entry([1], 0, 1)}, b"1"),
    "empty name": safetensors_bytes({"": entry([1], 0, 1)}, b"1"),
    "overlap": safetensors_bytes({"a": entry([4], 0, 4), "b": entry([4], 2, 6)}, b"123456"),
    "hole": safetensors_bytes({"a": entry([1], 0, 1), "b": entry([1], 2, 3)}, b"123"),
    "overflow": safetensors_bytes({"a": entry([1 << 62, 1 << 62], 0, 1)}, b"1"),
    "bad dtype": safetensors_bytes({"a": entry([1], 0, 1, "Z9")}, b"1"),
    "negative": safetensors_bytes({"a": entry([-1], 0, 1)}, b"1"),
    "trailing bytes": safetensors_bytes({"a": entry([1], 0, 1)}, b"1extra"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_checkpoints(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HOSTILE[what])
    with api.pull("m", path=path) as pull:
        error = error_of(pull)
    assert error.exit_code == EXIT_INTEGRITY
    assert "model.safetensors" in str(error)


def test_a_malformed_checkpoint_and_a_missing_one_by_command(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "model.safetensors"
    torn.write_bytes(checkpoint.read_bytes()[:-1000])
    base = ("--model", "m", "--coordinator", coordinator, "--json")
    failed(run("serve", str(torn), *base), EXIT_INTEGRITY, "model.safetensors")
    failed(run("serve", str(tmp_path / "nowhere"), *base), EXIT_CONFIG, "nowhere")
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )
    failed(run("serve", str(folder), *base), EXIT_INTEGRITY, "model-00001-of-00002.safetensors")


def test_a_model_larger_than_memory_is_refused_before_anything_is_taken(
    run: Run, coordinator: str, tmp_path: Path
) -> None:
    nbytes = 1 << 42
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({"a": entry([nbytes], 0, nbytes)}))
    os.truncate(path, path.stat().st_size + nbytes)  # sparse: 4 TiB that are not there
    with api.pull("m", path=path) as pull:
        error = error_of(pull)
    assert isinstance(error, CapacityError)
    assert "are free" in str(error)
    command = run("serve", str(path), "--model", "m", "--coordinator", coordinator, "--json")
    failed(command, EXIT_OTHER, "memory")


# -- the output -----------------------------------------------------------------------------------


def test_out_in_use(run: Run, coordinator: str, checkpoint: Path, tmp_path: Path) -> None:
    serve(run, checkpoint, "m", coordinator)
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    command = run("pull", "m", "--coordinator", coordinator, "--out", str(out), "--json")
    failed(command, EXIT_CONFIG, str(out))
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "precious"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_nothing_half_written(
    run: Run, coordinator: str, checkpoint: Path, tmp_path: Path
) -> None:
    serve(run, checkpoint, "m", coordinator)
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(small)], check=False
    )
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        command = run(
            "pull", "m", "--coordinator", coordinator, "--out", str(small / "out"), "--json"
        )
        failed(command, EXIT_OTHER, "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_pull_killed_while_writing_is_cleaned_up_by_the_next(
    run: Run, coordinator: str, large_checkpoint: Path, tmp_path: Path
) -> None:
    source = serve(run, large_checkpoint, "m", coordinator, *SLOWLY)
    out = tmp_path / "out"
    arguments = ("pull", "m", "--coordinator", coordinator, "--transport", "tcp", "--out", str(out))
    first = run(*arguments)
    first.until(lambda: any(tmp_path.iterdir()), "beginning")
    source.signal(signal.SIGSTOP)
    first.signal(signal.SIGKILL)
    first.wait()
    source.signal(signal.SIGCONT)
    assert not out.exists()
    run(*arguments, "--json").json()
    assert same(load_file(out / "model.safetensors"), load_file(large_checkpoint))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


# -- ports ----------------------------------------------------------------------------------------


def test_a_port_in_use(run: Run, coordinator: str, checkpoint: Path) -> None:
    failed(run("--listen", coordinator, daemon=True), EXIT_OTHER, coordinator.rpartition(":")[2])
    command = run(
        "serve", str(checkpoint), "--model", "m", "--coordinator", coordinator,
        "--listen", coordinator, "--json",
    )  # fmt: skip
    failed(command, EXIT_OTHER, coordinator.rpartition(":")[2])


def test_only_loopback_goes_without_tls(run: Run, coordinator: str, checkpoint: Path) -> None:
    failed(run("--listen", "0.0.0.0:0", daemon=True), EXIT_CONFIG, "--insecure")
    command = run(
        "serve", str(checkpoint), "--model", "m", "--coordinator", coordinator,
        "--listen", "0.0.0.0:0", "--json",
    )  # fmt: skip
    failed(command, EXIT_CONFIG, "--insecure")


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(descriptor)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(ports)


def test_garbage_on_every_port_does_no_harm(run: Run, checkpoint: Path) -> None:
    address, coordinator = start_coordinator(run)
    source = serve(run, checkpoint, "m", address)
    ports = listening_ports(coordinator.process.pid) + listening_ports(source.process.pid)
    assert len(ports) >= 3  # coordinator, control, data
    rng = random.Random(0)
    garbage = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(200),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
        b"\xff" * 4096,
        rng.randbytes(65536),
        b"",
    ]
    for port in ports:
        for data in garbage:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                try:
                    peer.sendall(data)
                    peer.shutdown(socket.SHUT_WR)
                    peer.settimeout(0.2)
                    while peer.recv(65536):
                        pass
                except OSError:
                    continue  # hung up on, or waiting for more: both are fine
    for options in ({}, {"transport": "tcp"}):
        with api.pull("m", coordinator=address, **options) as pull:  # type: ignore[arg-type]
            assert pull.wait(30).layers == 10


def test_a_peer_that_speaks_garbage(run: Run, coordinator: str) -> None:
    """What answers at an address is neither a source nor a coordinator."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def answer() -> None:
            listener.settimeout(0.1)
            while not stop.is_set():
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    continue
                with peer:
                    peer.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" + b"\0" * 500)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            with api.pull("m", peer=address) as pull:
                assert isinstance(error_of(pull), MxError)
            with api.pull("m", coordinator=address) as pull:
                assert isinstance(error_of(pull), MxError)
        finally:
            stop.set()
            thread.join()


# -- TLS ------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_tls_on_daemon_source_and_target(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    certificates = Folder(tmp_path)
    mine = certificates.flags("good")
    address = f"127.0.0.1:{free_port()}"
    daemon = run("--listen", address, *mine, daemon=True)
    daemon.until(lambda: "listens" in daemon.err, "listening")
    serve(run, checkpoint, "m", address, *mine)
    base = ("pull", "m", "--coordinator", address, "--json")
    for more in ((), ("--transport", "tcp"), ("--transport", "tcp", "--data-plaintext")):
        if "--data-plaintext" in more:
            # The source's data endpoints want TLS: a target that does not is refused.
            failed(run(*base, *mine, *more), EXIT_NO_SOURCE)
            continue
        out = tmp_path / f"out{len(more)}"
        run(*base, *mine, *more, "--out", str(out)).json()
        assert same(load_file(out / "model.safetensors"), load_file(checkpoint))
    failed(run(*base), EXIT_NOT_ALLOWED)
    assert run(*base, *certificates.flags("foreign", authority="theirs")).wait(30) in (
        EXIT_NO_SOURCE,
        EXIT_NOT_ALLOWED,
    )
    two_of_three = run(*base, *mine[:4])
    failed(two_of_three, EXIT_CONFIG, "tls_ca")
