"""A pull from an object store: S3 on loopback, by obstore, with faults."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx.errors import EXIT_INTEGRITY, EXIT_NO_SOURCE
from tests.support.chains import bytes_from, pulling, steps
from tests.support.commands import Command, Run, environment, free_port, serve
from tests.support.web_stores import Store, bucket, s3_environment

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torch_is_forked")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 12 MB in 6 layers, and two files."""
    root = tmp_path_factory.mktemp("objects") / "m"
    (root / "1_Pooling").mkdir(parents=True)
    write_checkpoint(root / "model.safetensors", llama_shapes(4, 384, 1024, 1024))
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "1_Pooling" / "config.json").write_text("{}")
    return root


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with bucket(folder.parent) as served:
        yield served


def pull(run: Run, store: Store, *more: str, model: str = "m") -> Command:
    """Pull from the store alone."""
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--from", "auto")
    url = ("--object-url", "s3://models/{name}", "--store-timeout-s", "5")
    return run("pull", model, *where, *url, *more, env=environment(**s3_environment(store)))


def spans(path: Path) -> tuple[int, dict[str, Any]]:
    """Return where a file's data begins, and its header."""
    with path.open("rb") as file:
        nbytes = int.from_bytes(file.read(8), "little")
        return 8 + nbytes, json.loads(file.read(nbytes))


def failed(command: Command, said: str, code: int) -> None:
    error = command.json()["error"]
    assert said in error["message"], error
    assert error["exit_code"] == command.wait(60) == code


def test_the_same_pin_as_from_the_disk(
    run: Run, store: Store, folder: Path, tmp_path: Path
) -> None:
    disk = run("pull", "m", "--from", f"disk={folder}", "--json").json()
    out = tmp_path / "out"
    found = pull(run, store, "--out", str(out), "--json", model=f"m@{disk['pin']}").json()
    assert found["pin"] == disk["pin"] and found["fallback"] == "objects"
    assert "defined_by" not in found and steps(found)["objects"] == "used"
    for name in ("model.safetensors", "config.json", "1_Pooling/config.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    failed(pull(run, store, "--json", model=f"m@{'0' * 64}"), "as requested", EXIT_INTEGRITY)
    assert pull(run, store, "--json").json()["defined_by"] == "objects"


def test_a_url_of_files(run: Run, folder: Path) -> None:
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--from", "auto")
    found = run("pull", "m", *where, "--object-url", f"file://{folder}", "--json").json()
    assert bytes_from(found).keys() == {"objects"}
    missing = run("pull", "m", *where, "--object-url", f"file://{folder}/none", "--json")
    failed(missing, "is not there, or no folder", EXIT_NO_SOURCE)


def test_the_store_gives_the_rest(run: Run, coordinator: str, store: Store, folder: Path) -> None:
    source = serve(run, folder, "m", coordinator, "--max-bandwidth", "3MB/s")
    settings: dict[str, object] = {"object_url": "s3://models/m", "stall_timeout_s": 3.0}
    with pulling(coordinator, environment(**s3_environment(store)), settings) as running:
        running.going()
        source.signal(signal.SIGKILL)
        report = running.ended()["report"]
    came = bytes_from(report)
    assert came["tcp"] > 0 and came["objects"] > 0
    assert sum(came.values()) == report["bytes"]
    # Headers and side files, and what lies between tensors, beside the bytes that were missing.
    assert store.sent_nbytes < came["objects"] + (1 << 20)


def test_layers_are_ready_while_later_ones_are_not_there(store: Store, folder: Path) -> None:
    # Requests run side by side: which of them are answered goes by what they ask for.
    data, header = spans(folder / "model.safetensors")
    last = header["model.layers.3.self_attn.q_proj.weight"]
    store.silent_from = data + last["data_offsets"][0]
    settings: dict[str, object] = {"object_url": "s3://models/m", "store_timeout_s": 3600.0}
    unused = f"127.0.0.1:{free_port()}"
    with pulling(unused, environment(**s3_environment(store)), settings) as running:
        running.going()
        store.until(lambda: store.silent > 0, "a request for the last layer")


def test_a_busy_store_is_asked_again(run: Run, store: Store) -> None:
    store.failing = 2
    assert pull(run, store, "--json").json()["fallback"] == "objects"


def test_a_store_that_always_fails(run: Run, store: Store) -> None:
    store.status = 503
    failed(pull(run, store, "--json"), "s3://models/m", EXIT_NO_SOURCE)
    assert len(store.requests) < 20


def test_a_store_that_refuses(run: Run, store: Store) -> None:
    store.status = 403
    failed(pull(run, store, "--json"), "403 Forbidden", EXIT_NO_SOURCE)


def test_a_store_that_stops(run: Run, store: Store) -> None:
    store.after = (3, "serving", False)
    stopped = pull(run, store, "--store-timeout-s", "1", "--json")
    failed(stopped, "no answer within 1 s", EXIT_NO_SOURCE)


def test_an_interrupt_ends_a_request(run: Run, store: Store) -> None:
    store.after = (3, "serving", False)
    stopped = pull(run, store, "--store-timeout-s", "1h", "--json")
    stopped.until(lambda: not store.serving, "the stop")
    stopped.signal(signal.SIGINT)
    assert stopped.wait(30) == 128 + signal.SIGINT


def test_an_interrupt_ends_a_request_for_the_rest(
    run: Run, coordinator: str, store: Store, folder: Path
) -> None:
    store.after = (1, "serving", False)
    source = serve(run, folder, "m", coordinator, "--max-bandwidth", "3MB/s")
    settings: dict[str, object] = {"object_url": "s3://models/m", "stall_timeout_s": 3.0}
    settings["store_timeout_s"] = 3600
    with pulling(coordinator, environment(**s3_environment(store)), settings) as running:
        running.going()
        source.signal(signal.SIGKILL)
        store.until_stopped()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) != 0


@pytest.mark.parametrize("honours", [True, False])
def test_an_object_that_changes_while_it_is_read(run: Run, store: Store, *, honours: bool) -> None:
    store.honours_conditions = honours
    store.after = (2, "version", "second")
    failed(pull(run, store, "--json"), "changed while it was read", EXIT_INTEGRITY)


def test_bodies_that_end_early(run: Run, store: Store) -> None:
    store.after = (2, "short", True)
    failed(pull(run, store, "--json"), "model.safetensors", EXIT_NO_SOURCE)


@pytest.mark.parametrize("bad", ["header", "truncated", "pointer", "shard"])
def test_what_is_not_a_checkpoint(run: Run, folder: Path, tmp_path: Path, bad: str) -> None:
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    if bad == "header":
        path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    elif bad == "truncated":
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    elif bad == "pointer":
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    else:
        path.rename(path.with_name("other.safetensors"))
        index = '{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
        path.with_name("model.safetensors.index.json").write_text(index)
    with bucket(tmp_path) as store:
        failed(pull(run, store, "--json"), "s3://models/m", EXIT_INTEGRITY)


def test_credentials_in_a_url_are_not_shown(run: Run) -> None:
    where = ("--coordinator", f"127.0.0.1:{free_port()}", "--from", "auto", "--json")
    url = "gopher://user:secret@host/x?sig=secret"
    command = run("pull", "m", *where, "--object-url", url)
    assert command.json()["error"]["exit_code"] == command.wait(60) == 2
    assert "secret" not in command.out + command.err
