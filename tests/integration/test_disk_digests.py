"""Digests beside weights: what `--out` writes of a model lets pulls from disk show layers under a
pin, and local ranks divide what is read. Whatever the file says, no wrong byte is delivered."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import mx
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx import api, config
from mx.core.packaging import DIGESTS
from mx.errors import CheckpointError, DigestError, ManifestError, MxError
from mx.snapshots import indexing
from mx.snapshots.digests import decode
from mx.snapshots.indexing import index_folder
from mx.storage.disk_file import DiskBytes
from tests.support.folders import manifest_of
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SETTINGS = config.load(environ={"HOME": "/nonexistent", "MX_PEER_STALL_TIMEOUT_S": "60"})


def refused(name: str, **how: Any) -> MxError:
    with pytest.raises(MxError) as caught:
        pulled(name, **how)
    return caught.value


def pulled(name: str, **how: Any) -> tuple[dict[str, torch.Tensor], api.PullReport]:
    with api.pull(name, settings=SETTINGS, **how) as pull:
        report = pull.wait(120)
        return {key: tensor.clone() for key, tensor in pull.state_dict().items()}, report


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_checkpoint(folder / "model.safetensors", llama_shapes(4, 384, 1024, 2048))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def written(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, api.PullReport]:
    """What a pull with `out` has written of it."""
    out = tmp_path_factory.mktemp("written") / "out"
    return out, pulled("m", path=weights, out=out)[1]


@pytest.fixture
def folder(written: tuple[Path, api.PullReport], tmp_path: Path) -> Path:
    """A copy of it, to be spoilt."""
    return Path(shutil.copytree(written[0], tmp_path / "copy"))


def test_they_are_the_models_and_no_part_of_it(
    written: tuple[Path, api.PullReport], weights: Path, tmp_path: Path
) -> None:
    out, report = written
    described, pages = decode((out / DIGESTS).read_bytes())
    right = manifest_of(weights)
    assert described.ref.identity == right.ref.identity and not pages.missing
    assert (out / DIGESTS).stat().st_size < 20_000
    # The folder has the pin of the one that it was pulled from, and is pulled without them.
    with api.serve(out, model="m", settings=SETTINGS) as source:
        assert source.manifest.ref.pin.hex() == report.pin == right.ref.pin.hex()
        _, again = pulled("m", peer=source.endpoint, out=tmp_path / "again", attach=True)
        assert again.pin == report.pin
    # Of attached memory they were hashed as it was written.
    assert (tmp_path / "again" / DIGESTS).read_bytes() == (out / DIGESTS).read_bytes()


class Gate:
    """Holds reads of a file's last bytes until it is opened, for a minute at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.passed = threading.Event()
        self.timed_out = False
        end, read = path.stat().st_size - (1 << 20), DiskBytes.read_exactly

        def held(bytes_: DiskBytes, view: memoryview, position: int, nbytes: int) -> None:
            if position + nbytes > end and not self.passed.wait(60):
                self.timed_out = True
            read(bytes_, view, position, nbytes)

        monkeypatch.setattr(DiskBytes, "read_exactly", held)


@pytest.mark.parametrize("pin", ["identity", "pin"])
def test_the_first_layer_of_a_pinned_model_is_ready_before_the_last_is_read(
    written: tuple[Path, api.PullReport], monkeypatch: pytest.MonkeyPatch, pin: str
) -> None:
    out, report = written
    gate = Gate(monkeypatch, out / "model.safetensors")
    with api.pull(f"m@{getattr(report, pin)}", path=out, settings=SETTINGS) as pull:
        pull.on_layer(lambda event: gate.passed.set())
        found = pull.wait(120)
        assert same(pull.state_dict(), load_file(out / "model.safetensors"))
    assert not gate.timed_out
    assert found.verified == "digest" and not found.defined_by
    assert [(path.transport, path.bytes) for path in found.paths] == [("disk", found.bytes)]


def test_a_strong_pull_says_so(written: tuple[Path, api.PullReport]) -> None:
    out, report = written
    tensors, found = pulled(f"m@{report.pin}", path=out, verify="strong")
    assert same(tensors, load_file(out / "model.safetensors")) and found.verified == "strong"


def test_without_them_a_pin_is_checked_before_anything_is_delivered(
    folder: Path, written: tuple[Path, api.PullReport]
) -> None:
    (folder / DIGESTS).unlink()
    tensors, report = pulled(f"m@{written[1].pin}", path=folder)
    assert same(tensors, load_file(folder / "model.safetensors")) and report.pin == written[1].pin
    # 31 zeros begin no pin that there is.
    assert isinstance(refused("m@" + 31 * "0", path=folder), CheckpointError)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/mx/digests"


@pytest.fixture(params=["own", "linked"])
def unwritten(request: pytest.FixtureRequest, weights: Path, tmp_path: Path, state: Path) -> Path:
    """A folder that no pull has written: this user's own, or with links, as a cache has them."""
    folder = tmp_path / "unwritten"
    if request.param == "own":
        return Path(shutil.copytree(weights, folder))
    folder.mkdir()
    for each in weights.iterdir():
        (folder / each.name).symlink_to(each)
    return folder


@pytest.mark.parametrize("by", ["identity", "pin"])
def test_a_folder_that_was_indexed_shows_layers_under_a_pin(
    unwritten: Path, state: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    indexed = index_folder(unwritten)
    own = not (unwritten / "model.safetensors").is_symlink()
    assert indexed.remembered and not indexed.found.compared
    assert Path(indexed.digests).parent == (unwritten / "digests" if own else state)
    assert (unwritten / DIGESTS).exists() == own
    digests = getattr(indexed.found.manifest.ref, by).hex()
    gate = Gate(monkeypatch, unwritten / "model.safetensors")
    with api.pull(f"m@{digests}", path=unwritten, settings=SETTINGS) as pull:
        pull.on_layer(lambda event: gate.passed.set())
        pull.wait(120)
        assert same(pull.state_dict(), load_file(unwritten / "model.safetensors"))
    assert not gate.timed_out


def test_what_an_index_says_is_checked_as_a_folder_s_own(
    unwritten: Path, state: Path, weights: Path
) -> None:
    indexed = index_folder(unwritten)
    identity = indexed.found.manifest.ref.identity.hex()
    kept = Path(indexed.digests)
    data = kept.read_bytes()
    for lie in LIES.values():
        kept.write_bytes(lie(data))
        tensors, _ = pulled(f"m@{identity}", path=unwritten)
        assert same(tensors, load_file(weights / "model.safetensors"))
    # A broken one beside the weights keeps those elsewhere from nothing.
    kept.write_bytes(data)
    (unwritten / "digests").mkdir(exist_ok=True)
    (unwritten / DIGESTS).write_bytes(b"broken")
    assert same(pulled(f"m@{identity}", path=unwritten)[0], tensors)


def test_a_folder_that_holds_something_else_is_not_indexed(unwritten: Path, state: Path) -> None:
    with pytest.raises(CheckpointError):
        index_folder(unwritten, "0" * 16)
    assert not (unwritten / DIGESTS).exists() and not state.exists()


def test_of_many_models_the_newest_digests_are_kept(
    weights: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "MOST_KEPT", 2)
    for number in range(3):
        indexing._write(weights / "model.safetensors", f"{number:064}", b"x")
        os.utime(state / f"{number:064}.mx", ns=(number, number))
    assert sorted(each.name for each in state.iterdir()) == [f"{n:064}.mx" for n in (1, 2)]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "of another release": lambda data: b"mxdigest2" + data[9:],
    "without pages": lambda data: data[:-32],
    "another page": lambda data: data[:-32] + bytes(32),
    "another identity": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "enormous": lambda data: data[:16] + b"\xff" * 16 + data[32:],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_lies_changes_nothing(
    folder: Path, written: tuple[Path, api.PullReport], lie: str
) -> None:
    file = folder / DIGESTS
    file.write_bytes(LIES[lie](file.read_bytes()))
    tensors, report = pulled(f"m@{written[1].identity}", path=folder)
    assert same(tensors, load_file(folder / "model.safetensors"))
    assert report.identity == written[1].identity


def test_digests_of_another_model_are_not_used(
    folder: Path, written: tuple[Path, api.PullReport], tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = next(iter(tensors))
    tensors[name][0] += 1
    (tmp_path / "other").mkdir()
    save_file(tensors, tmp_path / "other/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "other/config.json").write_text("{}")
    _, other = pulled("m", path=tmp_path / "other", out=tmp_path / "of-other")
    shutil.copy(tmp_path / "of-other" / DIGESTS, folder / DIGESTS)
    # By the pin of what is there it is pulled; by that of which the digests are it is not.
    found, _ = pulled(f"m@{written[1].identity}", path=folder)
    assert same(found, load_file(folder / "model.safetensors"))
    error = refused(f"m@{other.identity}", path=folder)
    assert isinstance(error, DigestError) and "the model's identity" in str(error)


@pytest.mark.parametrize("slices", [False, True])
def test_weights_that_changed_since_are_never_delivered_as_the_pinned_ones(
    folder: Path, written: tuple[Path, api.PullReport], slices: bool
) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    how: dict[str, Any] = {"slices": {"*q_proj*": mx.Shard(0, 0, 2)}} if slices else {}
    error = refused(f"m@{written[1].identity}", path=folder, **how)
    assert isinstance(error, DigestError)
    # Without a pin the folder itself says what the model is.
    tensors, report = pulled("m", path=folder, **how)
    right = load_file(file)
    if slices:
        right = {n: t.chunk(2)[0] if "q_proj" in n else t for n, t in right.items()}
    assert same(tensors, {name: tensor.contiguous() for name, tensor in right.items()})
    assert report.identity != written[1].identity and report.defined_by == "disk"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_are_refused_or_right(
    written: tuple[Path, api.PullReport], data: st.DataObject
) -> None:
    raw = bytearray((written[0] / DIGESTS).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        manifest, pages = decode(bytes(raw[:cut] if data.draw(st.booleans()) else raw))
    except ManifestError:
        return
    right, all_right = decode((written[0] / DIGESTS).read_bytes())
    if manifest.ref.identity == right.ref.identity:
        for layer in range(len(right.layout.layers)):
            assert pages.get(layer) in (None, all_right.get(layer))


RANKS = 2


def _is_cut(name: str) -> bool:
    return "q_proj" in name or "down_proj" in name


@pytest.mark.parametrize("pinned", [True, False])
def test_local_ranks_read_each_block_once(
    written: tuple[Path, api.PullReport], monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    out, report = written
    read_nbytes, lock, read = 0, threading.Lock(), DiskBytes.read_exactly

    def counted(bytes_: DiskBytes, view: memoryview, position: int, nbytes: int) -> None:
        nonlocal read_nbytes
        with lock:
            read_nbytes += nbytes
        read(bytes_, view, position, nbytes)

    monkeypatch.setattr(DiskBytes, "read_exactly", counted)
    found: dict[int, dict[str, torch.Tensor]] = {}
    failures: list[MxError] = []

    def one(rank: int) -> None:
        slices = {"*q_proj*": mx.Shard(0, rank, RANKS), "*down_proj*": mx.Shard(1, rank, RANKS)}
        ranks = mx.LocalRanks(rank, RANKS, f"digests-{pinned}", wait_s=60)
        name = f"m@{report.identity}" if pinned else "m"
        try:
            found[rank], _ = pulled(name, path=out, slices=slices, local_ranks=ranks)
        except MxError as error:
            failures.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not failures
    right = load_file(out / "model.safetensors")
    for rank, tensors in found.items():
        dims = {name: 0 if "q_proj" in name else 1 for name in right if _is_cut(name)}
        cut = {n: t.chunk(RANKS, dims[n])[rank] if n in dims else t for n, t in right.items()}
        assert same(tensors, {name: tensor.contiguous() for name, tensor in cut.items()})
    # Windows begin and end at pages.
    assert read_nbytes <= 1.05 * sum(tensor.nbytes for tensor in right.values())
