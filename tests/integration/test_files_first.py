"""The manifest and the side files come before the weights, or without them."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mx import api, config
from mx.core.digest import document_digest
from mx.errors import (
    EXIT_CONFIG,
    EXIT_NO_SOURCE,
    EXIT_OTHER,
    ClosedError,
    ConfigError,
    IntegrityError,
    MxError,
    NoSourceError,
)
from tests.support.commands import Run, commands, serve, start_coordinator
from tests.support.folders import tree
from tests.support.outcomes import error_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b'{"vocab": []}' * 400_000,  # several pages
    "1_Pooling/config.json": b"{}",
    "1_Pooling/again.json": b"{}",
    "empty.txt": b"",
}
#: The 28 MB of weights take half a minute.
SLOW = ("--max-bandwidth", "1MB/s")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A checkpoint with side files."""
    made = tmp_path_factory.mktemp("files") / "m"
    made.mkdir()
    shutil.copy(checkpoint, made / "model.safetensors")
    for path, data in FILES.items():
        (made / path).parent.mkdir(exist_ok=True)
        (made / path).write_bytes(data)
    return made


@pytest.fixture(scope="module")
def at(folder: Path) -> Iterator[str]:
    """A coordinator that knows "m", whose weights come slowly."""
    with commands() as start:
        coordinator, _ = start_coordinator(start)
        serve(start, folder, "m", coordinator, *SLOW)
        yield coordinator


# -- before the weights ---------------------------------------------------------------------------


def test_manifest_and_files_are_there_while_the_weights_come(
    at: str, settings: config.Settings
) -> None:
    with api.pull("m", coordinator=at, transport="tcp", settings=settings) as pull:
        manifest = pull.wait_manifest(60)
        assert manifest is pull.manifest
        files = pull.files(60)
        assert files == FILES
        digests = {side.path: side.digest for side in manifest.packaging.side_files}
        assert {path: document_digest(data) for path, data in files.items()} == digests
        assert pull.report is None and pull.progress().layers_ready < pull.progress().layers_total
        files.clear()
        assert pull.files(0) == FILES  # they are here
    with pytest.raises(ClosedError):
        pull.files()
    assert pull.wait_manifest() is manifest


def test_the_async_forms(at: str, settings: config.Settings) -> None:
    async def main() -> None:
        async with api.pull("m", coordinator=at, transport="tcp", settings=settings) as pull:
            files = asyncio.create_task(pull.files_async())
            manifest = await pull.wait_manifest_async()
            assert len(manifest.packaging.side_files) == len(FILES)
            assert await files == await pull.files_async() == FILES
            assert pull.report is None

    asyncio.run(main())


def test_the_pulls_error_is_that_of_its_manifest_and_its_files(
    at: str, settings: config.Settings
) -> None:
    with api.pull("unknown", coordinator=at, settings=settings) as pull:
        for call in (pull.wait_manifest, pull.files):
            with pytest.raises(MxError, match="unknown") as caught:
                call(60)
            assert caught.value.exit_code == EXIT_NO_SOURCE


def test_while_there_is_no_source_time_runs_out(at: str) -> None:
    waiting = config.load({"wait_s": 600}, environ={"HOME": "/nonexistent"})
    with api.pull("unknown", coordinator=at, settings=waiting) as pull:
        for call in (pull.wait_manifest, pull.files):
            with pytest.raises(TimeoutError):
                call(0.01)
    with pytest.raises(ClosedError):
        pull.wait_manifest()


def test_the_end_of_a_pull_ends_a_request(at: str) -> None:
    waiting = config.load({"wait_s": 600}, environ={"HOME": "/nonexistent"})

    async def main() -> None:
        pull = api.pull("unknown", coordinator=at, settings=waiting)
        requests = [pull.files_async(), pull.wait_manifest_async()]
        waiters = [asyncio.create_task(each) for each in requests]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(pull.close)
        for waiter in waiters:
            with pytest.raises(ClosedError):
                await waiter

    asyncio.run(main())


def test_weights_from_memory_have_no_files(
    coordinator: str, settings: config.Settings, tmp_path: Path
) -> None:
    weights = {"w": torch.arange(100_000)}
    with api.serve(weights, model="m", coordinator=coordinator, settings=settings):
        with api.pull("m", coordinator=coordinator, settings=settings) as pull:
            assert pull.files(60) == {}
            assert pull.wait(60).bytes == 800_000
        pull = api.pull("m", coordinator=coordinator, files_only=True, settings=settings)
        with pull, pytest.raises(NoSourceError, match="no files"):
            pull.files(60)
        out = tmp_path / "out"
        pull = api.pull("m", coordinator=coordinator, files_only=True, out=out, settings=settings)
        with pull:
            error = error_of(pull)
        assert error.exit_code == EXIT_NO_SOURCE and "files_only" in error.hint
        assert not list(tmp_path.iterdir())


def test_some_files_are_pulled_by_name_or_pattern(
    coordinator: str, folder: Path, settings: config.Settings, tmp_path: Path
) -> None:
    """Those that the model has; with none of them the manifest is all that comes."""
    with api.serve(folder, model="m", coordinator=coordinator, settings=settings):
        every = api.pull("m", coordinator=coordinator, files_only=True, settings=settings)
        with every:
            files = every.files(60)
        assert "config.json" in files and len(files) > 1
        wanted: list[tuple[list[str], set[str]]] = [
            (["config.json", "no-such.json"], {"config.json"}),
            (["conf*"], {name for name in files if name.startswith("conf")}),
            (["no-such.json"], set()),
            ([], set()),
        ]
        for where in ({"coordinator": coordinator}, {"path": folder}):
            for names, expected in wanted:
                with api.pull("m", files_only=names, settings=settings, **where) as some:
                    assert some.files(60) == {name: files[name] for name in expected}
                    report = some.wait(60)
                    assert report.files is not None and report.files.count == len(expected)
                    if "coordinator" in where:
                        assert some.wait_manifest(60).layout.tensors
        out = tmp_path / "some"
        with api.pull(
            "m", coordinator=coordinator, files_only=["config.json"], out=out, settings=settings
        ) as some:
            some.wait(60)
        assert [path.name for path in out.iterdir()] == ["config.json"]


# -- sources that die -----------------------------------------------------------------------------


def test_another_source_gives_the_files_of_one_that_died(
    run: Run, coordinator: str, folder: Path
) -> None:
    first = serve(run, folder, "m", coordinator, *SLOW)
    waiting = config.load({"wait_s": 60}, environ={"HOME": "/nonexistent"})
    with api.pull("m", coordinator=coordinator, transport="tcp", settings=waiting) as pull:
        next(pull.layers())
        second = serve(run, folder, "m", coordinator, *SLOW)  # after the pull found its sources
        first.end()
        assert pull.files(60) == FILES
        assert pull.report is None
    assert second.process.poll() is None


@pytest.mark.parametrize("fallback", [False, True])
def test_no_source_is_left_for_the_files(
    run: Run, coordinator: str, folder: Path, settings: config.Settings, fallback: bool
) -> None:
    """The weights are here; the fallback has the same files."""
    source = serve(run, folder, "m", coordinator)
    disk = folder if fallback else None
    with api.pull("m", coordinator=coordinator, fallback=disk, settings=settings) as pull:
        assert pull.wait(60).fallback is None
        source.end()
        if fallback:
            assert pull.files(60) == FILES
            return
        for _ in range(2):
            with pytest.raises(NoSourceError, match="no source of m answers"):
                pull.files(60)
        serve(run, folder, "m", coordinator)
        assert pull.files(60) == FILES  # it tries again


# -- from disk ------------------------------------------------------------------------------------


def test_files_of_a_checkpoint_on_disk(folder: Path, settings: config.Settings) -> None:
    with api.pull("m", path=folder, settings=settings) as pull:
        assert pull.files(60) == FILES
        manifest = pull.wait_manifest(60)
        assert pull.wait(60).identity == manifest.ref.identity.hex()
    with api.pull(f"m@{manifest.ref.pin.hex()}", path=folder, settings=settings) as pull:
        assert pull.files(60) == FILES
    with api.pull(f"m@{'0' * 64}", path=folder, settings=settings) as pull:
        with pytest.raises(IntegrityError):
            pull.files(60)
        with pytest.raises(IntegrityError):
            pull.wait_manifest(60)


def test_files_of_a_fallback(coordinator: str, folder: Path, settings: config.Settings) -> None:
    with api.pull("m", coordinator=coordinator, fallback=folder, settings=settings) as pull:
        assert pull.files(60) == FILES
        assert pull.wait_manifest(60).packaging.side_files
        assert pull.wait(60).fallback == "disk"
    pull = api.pull("m", coordinator=coordinator, fallback=folder, files_only=True,
                    settings=settings)  # fmt: skip
    with pull:
        assert pull.files(60) == FILES
        report = pull.wait()
        assert report.fallback == "disk"
        assert report.files is not None and report.files.source == str(folder)


# -- files only -----------------------------------------------------------------------------------


def test_files_alone_into_memory(
    at: str, run: Run, folder: Path, settings: config.Settings
) -> None:
    with api.pull("m", coordinator=at, files_only=True, settings=settings) as pull:
        assert pull.wait_manifest(60).ref.packaging
        assert pull.files(60) == FILES
        report, manifest = pull.wait(60), pull.wait_manifest()
        assert list(pull.layers()) == []
        assert (report.bytes, report.layers, report.paths) == (0, 0, [])
        assert (report.identity, report.pin) == (
            manifest.ref.identity.hex(),
            manifest.ref.pin.hex(),
        )
        assert report.files is not None
        assert report.files.bytes == pull.progress().bytes_total == sum(map(len, FILES.values()))
        for call in (pull.buffer, pull.state_dict):
            with pytest.raises(ConfigError, match="no tensors"):
                call()
    settled = tree(folder)
    assert settled.keys() == FILES.keys() | {"model.safetensors"}


def test_files_alone_take_no_place_of_a_reader(
    run: Run, coordinator: str, folder: Path, tmp_path: Path, settings: config.Settings
) -> None:
    """The source has one reader, and admits no other."""
    serve(run, folder, "m", coordinator, "--max-readers", "1", *SLOW)
    out = tmp_path / "out"
    with api.pull("m", coordinator=coordinator, transport="tcp", settings=settings) as weights:
        next(weights.layers())
        command = run("pull", "m", "--coordinator", coordinator, "--files-only", "--out", str(out),
                      "--json")  # fmt: skip
        found = command.json()
        assert command.wait() == 0
        assert weights.report is None
    assert tree(out) == FILES
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert found["files"]["count"] == len(FILES)
    assert found["bytes"] == found["layers"] == 0 and found["paths"] == []
    assert found["pin_covers_files"]


def test_what_the_command_says(at: str, run: Run, folder: Path, tmp_path: Path) -> None:
    for number, where in enumerate(("peer", f"disk={folder}", f"auto={folder}")):
        out = tmp_path / str(number)
        command = run("pull", "m", "--coordinator", at, "--from", where, "--files-only",
                      "--out", str(out))  # fmt: skip
        assert command.wait(60) == 0, command.err
        assert f"{len(FILES)} files without weights" in command.out
        assert f"written to {out}" in command.out
        assert ("compared with nothing" in command.out) == where.startswith("disk")
        assert tree(out) == FILES
    command = run("pull", "m", "--coordinator", at, "--files-only")
    assert command.wait(60) == 0, command.err
    assert "nothing was kept" in command.out


def test_a_pin_is_kept(at: str, run: Run, tmp_path: Path, settings: config.Settings) -> None:
    with api.pull("m", coordinator=at, files_only=True, settings=settings) as pull:
        ref = pull.wait_manifest(60).ref
    for number, pin in enumerate((ref.pin.hex(), ref.identity.hex(), ref.pin.hex()[:12])):
        out = tmp_path / str(number)
        command = run("pull", f"m@{pin}", "--coordinator", at, "--files-only", "--out", str(out))
        assert command.wait(60) == 0, command.err
        assert tree(out) == FILES
    command = run("pull", f"m@{'0' * 64}", "--coordinator", at, "--files-only",
                  "--out", str(tmp_path / "wrong"), "--json")  # fmt: skip
    assert "error" in command.json()
    assert command.wait(60) != 0
    assert not (tmp_path / "wrong").exists()


def test_weights_come_after_their_files(
    run: Run, coordinator: str, folder: Path, tmp_path: Path
) -> None:
    """As an engine does it: files first, then weights of the pin that they came with."""
    serve(run, folder, "m", coordinator)
    first = run("pull", "m", "--coordinator", coordinator, "--files-only", "--json",
                "--out", str(tmp_path / "files")).json()  # fmt: skip
    out = tmp_path / "out"
    second = run("pull", f"m@{first['pin']}", "--coordinator", coordinator, "--out", str(out))
    assert second.wait(60) == 0, second.err
    assert tree(out) == tree(folder)
    assert load_file(out / "model.safetensors").keys()


@pytest.mark.parametrize("option", ["--hold", "--device=cuda:0"])
def test_options_for_weights_are_refused(at: str, run: Run, option: str) -> None:
    command = run("pull", "m", "--coordinator", at, "--files-only", option, "--json")
    found = command.json()
    assert command.wait(60) == found["error"]["exit_code"]
    if option == "--hold":
        assert found["error"]["exit_code"] == EXIT_CONFIG
        assert "--files-only" in found["error"]["message"]
        assert "--hold" in found["error"]["message"]


def test_nothing_is_reused_by_files(at: str, folder: Path, settings: config.Settings) -> None:
    with (
        api.pull("m", path=folder, settings=settings) as held,
        pytest.raises(ConfigError, match="reuse"),
    ):
        held.wait(60)
        api.pull("m", coordinator=at, files_only=True, reuse=held, settings=settings)


@pytest.mark.parametrize("where", ["peer", "disk"])
def test_an_output_in_use(at: str, run: Run, folder: Path, tmp_path: Path, where: str) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    source = f"disk={folder}" if where == "disk" else "peer"
    command = run("pull", "m", "--coordinator", at, "--from", source, "--files-only",
                  "--out", str(out), "--json")  # fmt: skip
    found = command.json()
    assert command.wait(60) == EXIT_CONFIG and "not empty" in found["error"]["message"]
    assert tree(tmp_path) == {"out/mine": b""}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_nothing(at: str, run: Run, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        command = run("pull", "m", "--coordinator", at, "--files-only",
                      "--out", str(small / "out"), "--json")  # fmt: skip
        found = command.json()
        assert command.wait(60) == EXIT_OTHER and found["error"]["type"] == "CapacityError"
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_folder_without_files(
    run: Run, checkpoint: Path, tmp_path: Path, settings: config.Settings
) -> None:
    pull = api.pull("m", path=checkpoint, files_only=True, out=tmp_path / "out", settings=settings)
    with pull:
        error = error_of(pull)
    assert isinstance(error, ConfigError) and str(checkpoint) in error.message
    with pytest.raises(ConfigError, match="no files"):
        pull.files()
