"""Engines whose folder has weights: a peer's are allowed only where they are known to be the same.

A small engine stands for vLLM and SGLang; what it decides with is theirs.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import mmap
import os
import random
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mx
from mx import config, namekey
from mx.core.variant import ProcessingKey
from mx.engines.replica.choice import with_checkpoint
from mx.engines.replica.folder_hash import identity_of, remember
from mx.engines.replica.names import EligibleModels, meant_by
from mx.engines.replica.options import LoaderOptions
from mx.engines.replica.ranks import Ranks
from mx.engines.replica.run import RankRun
from mx.engines.replica.same_files import sources_of
from mx.engines.replica.tensors import copy_into, slots_of
from mx.errors import ConfigError, IntegrityError, MxError, NotAllowedError
from mx.memory.arena import MemfdArena
from mx.storage.disk_file import FileStamp, Stamp
from mx.storage.folder_index import FolderIndex
from mx.storage.load import load_opened
from mx.storage.mounts import file_system_of, is_local
from mx.storage.safetensors import open_checkpoint
from tests.support.daemon import daemon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


class Plain(torch.nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(96, 96), torch.nn.Linear(96, 8)


class _Group:
    rank_in_group, world_size = 0, 1


@pytest.fixture
def coordinator() -> Iterator[str]:
    with daemon() as (_, address):
        yield address


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk, where stamps prove something."""
    fd = os.open(tmp_path, os.O_RDONLY)
    in_memory = file_system_of(fd) == "tmpfs"
    os.close(fd)
    if not in_memory:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mx"


def saved(folder: Path, seed: int = 0, shards: int = 1) -> Path:
    """Save a checkpoint, and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tensors = Plain().state_dict()
    names = sorted(tensors)
    for number in range(shards):
        name = "model.safetensors" if shards == 1 else f"part-{number}.safetensors"
        part = {each: tensors[each] for each in names[number::shards]}
        save_file(part, str(folder / name))
    return folder


def started(
    called: Path | str, coordinator: str, revision: str | None = None, **options: Any
) -> tuple[Plain, RankRun]:
    """Load a model as an engine does: from peers if that is allowed, else from its folder."""
    read = LoaderOptions.read({"coordinator": coordinator, "lend": False, **options})
    group: Any = _Group()
    meant = meant_by(str(called), given=read.model, revision=revision)
    run = RankRun("Engine", meant, read, {}, Ranks(group, group, (0, 1)), Path(called))
    model = Plain()
    slots = slots_of(model, non_persistent=False)
    try:
        if run.choice.state:
            loaded = False
            try:
                pull = run.pull(hold=False)
                for layer in pull.layers():
                    copy_into(slots, run.compared(layer.tensors().items()))
                loaded = True
            except MxError as error:
                run.error = error
            run.agreed(loaded)
        if not run.choice.state:
            for file in Path(called).glob("*.safetensors"):
                model.load_state_dict(load_file(file), strict=False)
        run.loaded(model)
    finally:
        run.end()
    if run.loading.hashing is not None:
        run.loading.hashing.join()
    return model, run


def loads(folder: Path) -> dict[str, torch.Tensor]:
    """Return what is in a folder's files."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def equal(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> bool:
    state = model.state_dict()
    return all(torch.equal(state[name], tensor) for name, tensor in tensors.items())


def change(file: Path, at: int) -> None:
    """Change one byte; size and time of change stay."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_two_folders_of_one_name(
    coordinator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, own = saved(tmp_path / "x" / "final", 1), saved(tmp_path / "y" / "final", 2)
    with mx.serve(served, coordinator=coordinator):
        model, run = started(own, coordinator)
    assert equal(model, loads(own)) and not equal(model, loads(served))
    assert run.loading.loads == {"ordinary": 1}
    (line,) = [each.getMessage() for each in caplog.records if each.name == "engine.mx_peer"
               if each.levelno == logging.WARNING]  # fmt: skip
    assert str(own) in line and "final@PIN" in line and "ordinary loader takes over" in line


@pytest.mark.parametrize("shards", [1, 3])
def test_the_files_that_a_source_has_read(
    coordinator: str, tmp_path: Path, shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Under any name, and by any path: the files are the same."""
    caplog.set_level(logging.INFO, "engine.mx_peer")
    folder = saved(tmp_path / "folder", 3, shards)
    link = tmp_path / "link"
    link.symlink_to(folder)
    hard = tmp_path / "hard"
    hard.mkdir()
    for file in folder.iterdir():
        os.link(file, hard / file.name)
    with mx.serve(folder, model="any/name", coordinator=coordinator) as source:
        for called in (folder, link, hard):
            model, run = started(called, coordinator)
            assert equal(model, loads(folder))
            assert run.loading.loads == {"checkpoint": 1}, caplog.text
            assert run.loading.identity == source.identity_hex
        taken = [line for line in caplog.messages if line.startswith("engine.taken ")]
        pin = source.pinned.rpartition("@")[2]
        assert [f" pin={pin} " in line for line in taken] == [True] * 3
        (tmp_path / "copied").mkdir()
        for file in folder.iterdir():
            shutil.copy2(file, tmp_path / "copied")
        _, run = started(tmp_path / "copied", coordinator)
        assert run.loading.loads == {"ordinary": 1}


def test_one_changed_element_anywhere(coordinator: str, tmp_path: Path) -> None:
    """Size and time of change are as before, and so is the inode."""
    draw = random.Random(4)
    folder = saved(tmp_path / "folder", 4)
    file = folder / "model.safetensors"
    nbytes = file.stat().st_size
    with mx.serve(folder, coordinator=coordinator) as source:
        _, run = started(folder, coordinator)
        assert run.loading.loads == {"checkpoint": 1}
        for _ in range(8):
            change(file, nbytes - 1 - draw.randrange(4 * 96 * 96))
            model, run = started(folder, coordinator)
            assert run.loading.loads == {"ordinary": 1}
            assert equal(model, loads(folder))
    del source


def test_a_folder_that_was_replaced(coordinator: str, tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "folder", 5), saved(tmp_path / "other", 6)
    with mx.serve(folder, coordinator=coordinator):
        folder.rename(tmp_path / "before")
        other.rename(folder)
        model, run = started(folder, coordinator)
        assert run.loading.loads == {"ordinary": 1} and equal(model, loads(folder))
        model, run = started(tmp_path / "before", coordinator)
        assert run.loading.loads == {"checkpoint": 1}


def test_a_folder_that_was_hashed_before(coordinator: str, tmp_path: Path, state: Path) -> None:
    """The first start reads the folder, and has it hashed; the next one may take a peer's."""
    folder = saved(tmp_path / "x" / "model", 7)
    copied = tmp_path / "y" / "model"
    shutil.copytree(folder, copied)
    with mx.serve(folder, coordinator=coordinator) as source:
        _, run = started(copied, coordinator)
        assert run.loading.loads == {"ordinary": 1} and run.loading.hashing is not None
        model, run = started(copied, coordinator)
        assert run.loading.loads == {"checkpoint": 1}
        assert run.loading.identity == source.identity_hex
        assert equal(model, loads(folder))
        change(
            copied / "model.safetensors", copied.joinpath("model.safetensors").stat().st_size - 9
        )
        model, run = started(copied, coordinator)
        assert run.loading.loads == {"ordinary": 1} and equal(model, loads(copied))


def test_the_identity_of_a_folder_is_that_of_its_source(coordinator: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", 8, shards=2)
    with mx.serve(folder, coordinator=coordinator) as source:
        identity, stamps = identity_of(folder)
        assert identity == source.identity_hex
        (listed,) = sources_of(stamps)
        assert (listed.identity, listed.name) == (identity, "model")
        assert sources_of(stamps[:1]) == []
    assert sources_of(stamps) == []


def test_a_stale_entry_is_refused_by_the_sample(
    coordinator: str, tmp_path: Path, state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever says that the weights are the same: the folder's own bytes are compared, too."""
    folder, other = saved(tmp_path / "x" / "model", 9), saved(tmp_path / "y" / "model", 10)
    with mx.serve(folder, coordinator=coordinator) as source:
        assert remember(other, state)
        _, stamps = identity_of(other)
        assert FolderIndex(state).record(
            stamps, source.identity_hex, max(s[4] for s in stamps) + 10**10
        )
        model, run = started(other, coordinator)
        assert run.loading.loads == {"ordinary": 1}
        assert "of the peer is not what" in caplog.text
        assert equal(model, loads(other))


def test_what_the_user_says_is_believed_as_far_as_a_sample_goes(
    coordinator: str, tmp_path: Path
) -> None:
    folder, other = saved(tmp_path / "x" / "model", 11), saved(tmp_path / "y" / "model", 12)
    copied = tmp_path / "z" / "model"
    shutil.copytree(folder, copied)
    with mx.serve(folder, model="m", coordinator=coordinator) as source:
        for name in ("m", source.pinned, f"m@{source.identity_hex}"):
            _, run = started(copied, coordinator, model=name)
            assert run.loading.loads == {"checkpoint": 1}
        model, run = started(other, coordinator, model="m")
        assert run.loading.loads == {"ordinary": 1} and equal(model, loads(other))
        with pytest.raises(IntegrityError, match="is not what"):
            started(other, coordinator, model=source.pinned)
        model, run = started(other, coordinator, model=source.pinned, fallback=True)
        assert run.loading.loads == {"ordinary": 1} and equal(model, loads(other))


class _Noting(RankRun):
    """One that notes the tensors that it has pulled."""

    def compared(self, tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        self.noted: list[weakref.ref[torch.Tensor]] = []

        def noting() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                self.noted.append(weakref.ref(tensor))
                yield name, tensor

        yield from super().compared(noting())


def test_a_load_that_fails_keeps_no_memory(coordinator: str, tmp_path: Path) -> None:
    """Neither for garbage collection, nor as long as its error is there."""
    folder, other = saved(tmp_path / "x" / "model", 14), saved(tmp_path / "y" / "model", 15)
    group: Any = _Group()
    with mx.serve(folder, model="m", coordinator=coordinator) as source:
        options = {"coordinator": coordinator, "lend": False, "transport": "tcp"}
        read = LoaderOptions.read({**options, "model": source.pinned})
        meant = meant_by(str(other), given=read.model)
        run = _Noting("Engine", meant, read, {}, Ranks(group, group, (0, 1)), other)
        gc.disable()
        try:
            try:
                run.fill(slots_of(Plain(), non_persistent=False))
            except IntegrityError as error:
                run.error = error
            with pytest.raises(IntegrityError) as caught:
                run.agreed(False)
            assert run.noted and {each() for each in run.noted} == {None}
        finally:
            gc.enable()
    assert "fill" in [entry.name for entry in caught.traceback]


def test_a_pin_fails_closed(coordinator: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", 13)
    pinned = "m@" + "ab" * 32
    with pytest.raises(MxError):
        started(folder, coordinator, model=pinned)
    _, run = started(folder, coordinator, model=pinned, fallback=True)
    assert run.loading.loads == {"ordinary": 1}


def test_under_a_pin_a_key_that_can_not_be_believed_is_said(
    coordinator: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No state is taken without the name key: the user reads why his engine processes anew."""
    folder, key = saved(tmp_path / "model", 16), tmp_path / "name.key"
    key.write_bytes(bytes(32))
    key.chmod(0o644)
    state = ProcessingKey(engine="Engine", version="1", tp=(0, 1), dtype="fp32", state="processed")
    group: Any = _Group()
    with mx.serve(folder, model="m", coordinator=coordinator) as source:
        monkeypatch.setenv("MX_PEER_NAME_KEY", str(key))
        read = LoaderOptions.read({"coordinator": coordinator, "lend": False})
        meant = meant_by(source.pinned)
        run = RankRun(
            "Engine", meant, read, {"processed": state}, Ranks(group, group, (0, 1)), folder
        )
        assert run.choice.state == "checkpoint"
        run.end()
    assert "0644" in caplog.text and "pinned checkpoint" in caplog.text


def test_a_revision_is_honoured(coordinator: str, tmp_path: Path) -> None:
    """A hub id with its revision means what is served under that revision."""
    one, two = saved(tmp_path / "one", 14), saved(tmp_path / "two", 15)
    with (
        mx.serve(one, model="org/m", coordinator=coordinator),
        mx.serve(two, model="org/m", revision="abc", coordinator=coordinator),
    ):
        for revision, folder in ((None, one), ("main", one), ("abc", two)):
            model, run = started("org/m", coordinator, revision=revision, fallback=False)
            assert run.loading.loads == {"checkpoint": 1} and equal(model, loads(folder))
        model, _ = started(one, coordinator, revision="abc", model="org/m:abc", fallback=True)
        assert equal(model, loads(one))  # the folder's own
        with pytest.raises(ConfigError):
            started("org/m", coordinator, revision="other", fallback=False)
        with pytest.raises(ConfigError, match="revision"):
            meant_by("org/m", given="org/m:abc", revision="other")


_OTHER_USER = """
import json, os, socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
os.setgroups([]), os.setgid(65534), os.setuid(65534)
sock.listen(1)
print("ready", flush=True)
while True:
    found, _ = sock.accept()
    found.sendall(sys.argv[2].encode())
    found.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", ["other", "own"])
def test_another_users_source_is_not_asked(tmp_path: Path, user: str) -> None:
    """The kernel says whose it is, even where its socket is in this user's folder."""
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    stamp = (1, 2, 3, 4, 5)
    said = json.dumps({"version": 1, "models": [["m", "main", "ab" * 32, [stamp]]]})
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "files-1.sock"))
        code = _OTHER_USER if user == "other" else _OTHER_USER.replace("65534", "0")
        with subprocess.Popen(
            [sys.executable, "-c", code, str(sock.fileno()), said],
            stdout=subprocess.PIPE,
            pass_fds=[sock.fileno()],
        ) as process:
            assert process.stdout is not None and process.stdout.readline()
            found = sources_of([stamp], folder)
            process.kill()
    assert bool(found) == (user == "own")


_LISTS = """
import asyncio, sys
from pathlib import Path
from mx.wire.same_files import FilesListing
async def main():
    listing = FilesListing(lambda: [], Path(sys.argv[1]))
    await listing.start()
    print("listens", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await listing.close()
asyncio.run(main())
"""


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Give a folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="mx-") as folder:
        yield Path(folder)


def test_sockets_of_killed_processes_are_swept(sockets: Path) -> None:
    """By the next process that listens; what listens, or is not a socket, stays."""
    folder = sockets

    def listening(ends: contextlib.ExitStack) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _LISTS, str(folder)]
        pipe = subprocess.PIPE
        process = ends.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        ends.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline()
        return process

    def pids() -> set[int]:
        return {int(path.name.split("-")[1]) for path in folder.glob("files-*.sock")}

    with contextlib.ExitStack() as ends:
        killed, stays = listening(ends), listening(ends)
        killed.kill()
        killed.wait()
        # A container's process, which shares the folder: its number is that of no process here.
        elsewhere = folder / f"files-{killed.pid}-0.sock"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(elsewhere))
            sock.listen()
            (folder / f"files-{killed.pid}-1.sock").write_text("no socket")
            last = listening(ends)
            assert elsewhere.exists()
            assert pids() == {stays.pid, last.pid, killed.pid}
            assert len([*folder.glob(f"files-{killed.pid}-*")]) == 2
        assert sources_of([(1, 2, 3, 4, 5)], folder) == []
        assert not elsewhere.exists()


def test_what_is_no_list_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "files-dead.sock"))
    assert sources_of([(1, 2, 3, 4, 5)], folder) == []
    assert not (folder / "files-dead.sock").exists()
    folder.chmod(0o777)
    assert sources_of([(1, 2, 3, 4, 5)], folder) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 and struct.calcsize("3i") == 12


def test_a_folder_without_weights_is_its_name(coordinator: str, tmp_path: Path) -> None:
    served = saved(tmp_path / "x" / "model", 16)
    bare = tmp_path / "y" / "model"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text("{}")
    assert meant_by(str(bare)) == EligibleModels(("model",), how="the name says so")
    with mx.serve(served, coordinator=coordinator):
        model, run = started(bare, coordinator)
    assert run.loading.loads == {"checkpoint": 1} and equal(model, loads(served))


def test_weights_of_another_format_are_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    found = meant_by(str(folder))
    assert "can't be compared" in found.refused and found.folder == folder
    assert not meant_by(str(folder), given="m").refused


@pytest.mark.parametrize("more", ["an index and its shards", "another precision"])
def test_files_that_an_engine_reads_instead(coordinator: str, tmp_path: Path, more: str) -> None:
    """Of several that are there, sources read those that transformers does: vLLM and SGLang read
    what the index names, else all, and Mistral's own before the others."""
    folder, other = saved(tmp_path / "model", 25), saved(tmp_path / "other", 26, shards=2)
    if more == "another precision":
        other.joinpath("part-0.safetensors").rename(folder / "consolidated.safetensors")
    else:
        index = {name: file.name for file in other.iterdir() for name in load_file(file)}
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
        for file in other.iterdir():
            shutil.copy2(file, folder)
    with mx.serve(folder, coordinator=coordinator):
        for _ in range(2):  # before it was hashed, and then
            _, run = started(folder, coordinator)
            assert run.loading.loads == {"ordinary": 1}
            assert "which an engine may read instead" in run.meant.refused


@pytest.mark.parametrize("there", [True, False])
def test_an_index_of_files_in_a_folder_below(coordinator: str, tmp_path: Path, there: bool) -> None:
    """Where they are there, the folder has weights of its own."""
    served, own = saved(tmp_path / "x" / "model", 27), tmp_path / "y" / "model"
    (own / "shards").mkdir(parents=True)
    index = dict.fromkeys(load_file(served / "model.safetensors"), "shards/a.safetensors")
    (own / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if there:
        saved(tmp_path / "z", 28).joinpath("model.safetensors").rename(own / "shards/a.safetensors")
    with mx.serve(served, coordinator=coordinator):
        _, run = started(own, coordinator)
        assert run.loading.loads == ({"ordinary": 1} if there else {"checkpoint": 1})
        _, run = started(own, coordinator, model="model")  # the user's word: a sample is compared
        assert run.loading.loads == ({"ordinary": 1} if there else {"checkpoint": 1})


def test_settings_come_from_the_options(coordinator: str) -> None:
    assert LoaderOptions.read({}).fallback is None
    assert LoaderOptions.read({"fallback": False}).fallback is False
    with pytest.raises(ConfigError, match="true or false"):
        LoaderOptions.read({"fallback": "no"})
    assert config.state_folder({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path(
        "/h/.local/state/mx"
    )


def test_files_follow_the_weights(coordinator: str, tmp_path: Path) -> None:
    """The configuration that mx got for an engine came with other weights than are listed now."""
    served = saved(tmp_path / "model", 17)
    (served / "config.json").write_text("{}")
    with mx.serve(served, model="f", coordinator=coordinator) as source:
        files = source.manifest.ref.packaging.hex()
        model, run = started("f", coordinator, files=files, fallback=False)
        assert run.loading.loads == {"checkpoint": 1} and equal(model, loads(served))
        with pytest.raises(ConfigError, match="came from another source than its weights"):
            started("f", coordinator, files="ab" * 32, fallback=False)
        # With files of a peer's the ordinary loader has nothing to load.
        with pytest.raises(ConfigError, match="came from another source than its weights"):
            started("f", coordinator, files="ab" * 32, fallback=True)
        with pytest.raises(ConfigError, match="from a peer, and no weights of it"):
            started("none", coordinator, files=files)


def test_a_change_while_a_source_reads_is_not_listed(tmp_path: Path) -> None:
    """Even one that leaves the bytes as they are."""
    folder = saved(tmp_path / "model", 18)
    file = folder / "model.safetensors"

    def read(progress: Any) -> tuple[Stamp, ...]:
        made = load_opened(
            open_checkpoint(folder),
            lambda layout: MemfdArena(layout.arena_nbytes),
            threads=1,
            progress=progress,
        )
        made.arena.release()
        return made.stamps

    assert read(None) == (FileStamp.of(file.stat()).exact,)
    assert read(lambda done, total: file.chmod(0o600)) == ()
    assert read(None) == (FileStamp.of(file.stat()).exact,)


def test_file_systems_whose_stamps_prove_nothing(
    coordinator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: Path
) -> None:
    folder = saved(tmp_path / "model", 19)
    with open(folder / "model.safetensors", "rb") as here, open("/proc/self/status", "rb") as there:
        assert is_local(here.fileno()) and not is_local(there.fileno())
    monkeypatch.setattr("mx.storage.own_weights.is_local", lambda fd: False)
    with mx.serve(folder, coordinator=coordinator):
        _, run = started(folder, coordinator)
    assert run.loading.loads == {"ordinary": 1} and run.loading.hashing is None
    assert "file system" in run.meant.refused
    monkeypatch.setattr("mx.storage.disk_file.is_local", lambda fd: False)
    assert not remember(folder, state) and identity_of(folder)[1] == ()


@pytest.mark.parametrize("direct", [True, False])
def test_a_page_that_is_to_be_written_back(
    coordinator: str,
    tmp_path: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    direct: bool,
) -> None:
    """A program that has a file mapped may go on writing to such a page; no stamp says so."""
    if not direct:  # as on file systems without O_DIRECT, whose reads write no page back
        monkeypatch.setattr("mx.storage.disk_file._open_direct", lambda file: -1)
    folder = saved(tmp_path / "mapped", 20)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        mapped[-1] ^= 1
        with mx.serve(folder, coordinator=coordinator) as source:
            _, stamps = identity_of(folder)
            assert [each.identity for each in sources_of(stamps)] == [source.identity_hex]
            assert not meant_by(str(folder)).refused
            mapped[-1] ^= 1
            assert meant_by(str(folder)).refused
        assert remember(folder, state) and not meant_by(str(folder)).refused
        mapped[-1] ^= 1
        assert meant_by(str(folder)).refused


def test_files_in_memory_prove_nothing() -> None:
    """There a page is never written back."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        assert file_system_of(file.fileno()) == "tmpfs" and not is_local(file.fileno())


def test_a_folder_that_cannot_be_listed_may_have_weights(tmp_path: Path) -> None:
    """It may be entered: the ordinary loader reads what it knows by name."""
    folder = saved(tmp_path / "model", 24)
    folder.chmod(0o711)
    tmp_path.chmod(0o711)
    said = subprocess.run(
        [sys.executable, "-c", _WEIGHTS_OF, str(folder), str(tmp_path / "none")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout == "True False\n"


_WEIGHTS_OF = """
import ctypes, os, sys
from pathlib import Path
from mx.storage.own_weights import has_weights
os.chdir(Path(sys.argv[1]).parent)
names = [Path(each).name for each in sys.argv[1:]]
if os.geteuid():
    os.chmod(names[0], 0o311)
else:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(*(has_weights(Path(each)) for each in names))
"""


def test_another_users_home_is_left_alone(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder to another user")
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 65534, 65534)
    stamp = (1, 2, 3, 4, 5)
    with pytest.raises(NotAllowedError, match="another user's"):
        FolderIndex(home / ".local" / "state" / "mx").record([stamp], "ab" * 32, 10**10)
    assert not list(home.iterdir())


KEY = ProcessingKey(engine="test", version="1", dtype="fp32", state="processed", config="00ff00ff")


def chosen(called: Path | str, coordinator: str, **options: Any) -> RankRun:
    """Return the run of an engine that takes processed states, too, once it has chosen."""
    read = LoaderOptions.read({"coordinator": coordinator, "fallback": True, **options})
    group: Any = _Group()
    meant = meant_by(str(called), given=read.model)
    return RankRun(
        "Engine", meant, read, {"processed": KEY}, Ranks(group, group, (0, 1)), Path(called)
    )


def lent(
    model: Plain, name: str, identity: str, coordinator: str, name_key: Path | None = None
) -> mx.Source:
    """Lend a model's weights as the processed state of a checkpoint."""
    made = {} if name_key is None else {"name_key": str(name_key)}
    return mx.serve(
        dict(model.named_parameters()), model=name, variant=with_checkpoint(KEY, identity[:16]),
        copy=False, embed=False, settings=config.load({"coordinator": coordinator, **made}),
    )  # fmt: skip


def test_what_an_update_has_written_is_not_made_of_the_checkpoint(
    coordinator: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "rl", 21)
    model = Plain()
    model.load_state_dict(loads(folder))
    with mx.serve(folder, coordinator=coordinator) as source:
        state = lent(model, "rl", source.identity_hex, coordinator)
        called: list[tuple[Path | str, dict[str, str]]] = [
            (folder, {}),
            (tmp_path / "none", {"model": source.pinned}),
            (tmp_path / "none", {"model": "rl", "checkpoint": source.identity_hex[:8]}),
        ]
        with state:
            for path, how in called:
                assert chosen(path, coordinator, **how).choice.state == "processed"
            with state.changing():
                model.second.weight.data.add_(1)
            assert state.model.revision == "main.2"
            for path, how in called:
                assert chosen(path, coordinator, **how).choice.state == "checkpoint"
            # Another replica still has what was made of the checkpoint.
            before = Plain()
            before.load_state_dict(loads(folder))
            with lent(before, "rl", source.identity_hex, coordinator) as kept:
                assert kept.model.revision in ("main", "main.2", "main.3")
                for path, how in called:
                    found = chosen(path, coordinator, **how).choice
                    assert state.identity_hex not in found.identities.values()


def test_an_update_cannot_be_listed_as_what_it_replaced(coordinator: str) -> None:
    """Any source may list it: its owner has said that it is an update."""
    model = Plain()
    with lent(model, "listed", "ab" * 32, coordinator) as state:
        key = namekey.load(config.load())
        (first,) = mx.list_sources("listed", coordinator=coordinator)
        assert key.vouched(first.record)
        with state.changing():
            model.second.weight.data.add_(1)
        (then,) = mx.list_sources("listed", coordinator=coordinator)
        assert then.record.model.revision == "main.2" and key.vouched(then.record)
        assert not key.vouched(replace(then.record, model=first.record.model))


def test_an_update_is_lent_as_one(coordinator: str, tmp_path: Path) -> None:
    """A replica that started from it has the key of what it replaced, too."""
    folder = saved(tmp_path / "first", 22)
    model = Plain()
    model.load_state_dict(loads(folder))
    with mx.serve(folder, model="checkpoint", coordinator=coordinator) as source:
        identity = source.identity_hex
    with lent(model, "lent", identity, coordinator) as state:
        with state.changing():
            model.second.weight.data.add_(1)
        run = chosen("lent", coordinator)
        assert (run.choice.state, run.choice.revision) == ("processed", "main.2")
        replica = Plain()
        slots = slots_of(replica, non_persistent=False)
        run.fill(slots)
        assert run.agreed(True) and equal(replica, dict(model.named_parameters()))
        updated = state.identity_hex
    run.lend(slots, before_processing=False)
    run.end()
    lender = run.loading.lender
    assert lender is not None
    try:
        until_s = time.monotonic() + 60
        while lender.state == "starting" and time.monotonic() < until_s:
            time.sleep(0.01)
        assert lender.source is not None and lender.source.identity_hex == updated
        found = chosen("none", coordinator, model=f"lent@{identity}").choice
        assert updated not in found.identities.values()
        assert chosen("lent", coordinator).choice.state == "processed"
    finally:
        lender.close()


@pytest.mark.parametrize("whose", ["own", "stranger's"])
def test_a_folders_state_is_believed_by_the_own_key_alone(
    coordinator: str, tmp_path: Path, whose: str
) -> None:
    """The owner of a name may be anybody: the folder has it by chance."""
    folder = saved(tmp_path / whose / f"final-{len(whose)}", 23)
    name, key = folder.name, None if whose == "own" else tmp_path / "stranger.key"
    with lent(Plain(), name, "ab" * 32, coordinator, key) as first:  # who has the name now
        assert first.model.name == name
        with (
            mx.serve(folder, coordinator=coordinator) as source,
            lent(Plain(), name, source.identity_hex, coordinator, key) as state,
        ):
            found = chosen(folder, coordinator).choice
            assert (found.state == "processed") == (whose == "own")
            assert (state.identity_hex in found.identities.values()) == (whose == "own")
            if whose != "own":
                assert found.state == "checkpoint" and found.refused
