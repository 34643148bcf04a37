"""Snapshots: what processes hold is frozen, and thawed to the same bytes, or refused."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import mx
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx import config, namekey
from mx.core.packaging import DIGESTS
from mx.errors import (
    BundleIncompleteError,
    CheckpointError,
    ConfigError,
    DigestError,
    MxError,
    NotAllowedError,
)
from mx.snapshots.container import SECTOR_BYTES, SNAPSHOT, WEIGHTS, read
from mx.storage.header import parse_header
from tests.support.commands import Command, Run, environment, serve
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

#: Two ranks of one engine.
KEYS = [
    mx.ProcessingKey(engine="vllm", version="0.32.0", tp=(i, 2), dtype="bf16", state="processed")
    for i in range(2)
]


@pytest.fixture
def settings(tmp_path: Path) -> config.Settings:
    """Those of a user with a name key."""
    return of_user(tmp_path / "user")


def of_user(home: Path) -> config.Settings:
    home.mkdir(exist_ok=True, mode=0o700)
    found = {"HOME": str(home), "MX_PEER_NAME_KEY": str(home / "name.key")}
    return config.load(environ=found)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    write_checkpoint(folder / "model.safetensors", llama_shapes(2, 384, 1024, 2048))
    (folder / "config.json").write_text('{"a": 1}')
    return folder


def state(seed: int) -> dict[str, torch.Tensor]:
    """What an engine may hold: permuted, shared, empty and odd tensors, of several types."""
    torch.manual_seed(seed)
    tensors = {
        "embed.weight": torch.randn(300, 64),
        "model.layers.0.weight": torch.randn(1000, 700).t(),
        "model.layers.0.scale": torch.randn(7, dtype=torch.float64),
        "model.layers.1.packed": torch.randint(0, 255, (4, 64, 32), dtype=torch.uint8).permute(
            2, 0, 1
        ),
        "model.layers.1.whole": torch.randn(1024, 1024, dtype=torch.bfloat16),
        "model.layers.1.none": torch.empty(0, 4),
    }
    tensors["lm_head.weight"] = tensors["embed.weight"]
    tensors["model.layers.1.half"] = tensors["model.layers.1.whole"][512:]
    tensors["model.layers.1.turned"] = tensors["model.layers.1.whole"].t()
    return tensors


def agree(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Compare values, strides, and what shares memory."""
    assert same(found, wanted)
    for name, tensor in wanted.items():
        assert found[name].stride() == tensor.stride() or tensor.numel() == 0, name
    for first, second in (
        ("embed.weight", "lm_head.weight"),
        ("model.layers.1.whole", "model.layers.1.turned"),
    ):
        assert found[first].data_ptr() == found[second].data_ptr()


def thawed(folder: Path, name: str = "m", **how: Any) -> tuple[dict[str, torch.Tensor], Any]:
    with mx.pull(name, source="snapshot", path=folder, **how) as pull:
        report = pull.wait(120)
        return pull.state_dict(), report


def test_a_checkpoint_is_frozen_and_thawed(
    coordinator: str, settings: config.Settings, weights: Path, tmp_path: Path
) -> None:
    out = tmp_path / "snapshot"
    with mx.serve(weights, model="m", coordinator=coordinator, settings=settings) as source:
        report = mx.freeze("m", out, coordinator=coordinator, settings=settings)
        pin = source.manifest.ref.pin.hex()
    assert report.complete and report.signed and report.pins == (pin,)
    assert sorted(os.listdir(out)) == ["files", "rank0", SNAPSHOT]
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    expected = load_file(weights / "model.safetensors")
    # The signature says what it is, and the pin; each byte is verified as it is read.
    for name in ("m", f"m@{pin}"):
        tensors, found = thawed(out, name, settings=settings)
        assert same(tensors, expected) and found.pin == pin and not found.defined_by
        assert [(path.transport, path.bytes) for path in found.paths] == [("snapshot", found.bytes)]
    # Another user knows no key, and has to take the snapshot's word, or a pin.
    other = of_user(tmp_path / "other")
    tensors, found = thawed(out, settings=other)
    assert same(tensors, expected) and found.defined_by == "snapshot"
    assert not thawed(out, f"m@{pin}", settings=other)[1].defined_by
    # As a checkpoint again, with its files.
    with mx.pull("m", source="snapshot", path=out, out=tmp_path / "again", settings=other) as pull:
        pull.wait(60)
    assert (tmp_path / "again/config.json").read_bytes() == b'{"a": 1}'
    assert same(load_file(tmp_path / "again/model.safetensors"), expected)


def test_safetensors_reads_it_and_sectors_come_first(
    settings: config.Settings, tmp_path: Path
) -> None:
    wanted = state(1)
    mx.freeze(wanted, tmp_path / "s", model="m", variant="odd", settings=settings)
    path = tmp_path / "s/rank0" / WEIGHTS
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % SECTOR_BYTES == 0
    _, tensors = parse_header(data[8:start], path, len(data))
    is_whole = [(each.end - each.begin) % SECTOR_BYTES == 0 for each in tensors]
    assert is_whole == sorted(is_whole, reverse=True) and True in is_whole and False in is_whole
    assert all(each.begin % SECTOR_BYTES == 0 for each in tensors[: is_whole.count(True)])
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        turned = file.get_tensor("model.layers.0.weight")
    # What shares memory is there once; a permuted tensor has the shape of its storage.
    assert len(names) == 6 and torch.equal(turned.t(), wanted["model.layers.0.weight"])
    agree(thawed(tmp_path / "s", settings=settings)[0], wanted)


def test_all_ranks_are_frozen_and_thawed(
    coordinator: str, settings: config.Settings, tmp_path: Path
) -> None:
    out, states = tmp_path / "s", [state(1), state(2)]
    how: Any = {"coordinator": coordinator, "settings": settings}
    with mx.serve(states[0], model="m", variant=KEYS[0], copy=False, **how) as first:
        with pytest.raises(BundleIncompleteError, match=r"1 of 2 ranks.*tp=1/2"):
            mx.freeze("m", out, **how)
        assert not out.exists()
        with mx.serve(states[1], model="m", variant=KEYS[1], copy=False, **how) as second:
            report = mx.freeze("m", out, **how)
            assert report.complete and report.ranks == 2
            # What each rank's process holds makes the same snapshot, once both are there.
            apart = tmp_path / "apart"
            assert not mx.freeze(second, apart, settings=settings).complete
            with pytest.raises(ConfigError, match="not all were written"):
                read(apart)
            assert mx.freeze(first, apart, settings=settings).complete
    for folder in (out, apart):
        for number, key in enumerate(KEYS):
            agree(thawed(folder, variant=key, settings=settings)[0], states[number])
        with mx.thaw(folder, settings=settings) as found:
            assert found.vouched_by == "signature"
            for number, key in enumerate(KEYS):
                agree(found.pulls[str(key)].state_dict(), states[number])
    with pytest.raises(ConfigError, match="has 2 ranks"):
        thawed(out, settings=settings)
    fields = dict(KEYS[0].fields) | {"version": "0.33.0", "quantization": "awq", "tp": "0/4"}
    with pytest.raises(ConfigError) as caught:
        thawed(out, variant=mx.ProcessingKey(**fields), settings=settings)
    for said in (
        "version: 0.32.0 in the snapshot, 0.33.0 here",
        "tp: 0/2 in the snapshot, 0/4 here",
        "quantization: none in the snapshot, awq here",
    ):
        assert said in str(caught.value)


def test_what_may_not_be_signed_is_frozen_under_its_pin(
    coordinator: str, settings: config.Settings, weights: Path, tmp_path: Path
) -> None:
    other = of_user(tmp_path / "other")
    with mx.serve(weights, model="m", coordinator=coordinator, settings=settings) as source:
        with pytest.raises(ConfigError, match="another owner's") as caught:
            mx.freeze("m", tmp_path / "s", coordinator=coordinator, settings=other)
        assert source.identity_hex in str(caught.value)
        name = f"m@{source.identity_hex}"
        report = mx.freeze(name, tmp_path / "s", coordinator=coordinator, settings=other)
    assert report.complete and not report.signed
    assert thawed(tmp_path / "s", settings=settings)[1].defined_by == "snapshot"
    assert not thawed(tmp_path / "s", name, settings=settings)[1].defined_by


@pytest.fixture
def frozen(settings: config.Settings, weights: Path, tmp_path: Path) -> Path:
    out = tmp_path / "snapshot"
    held = load_file(weights / "model.safetensors")
    mx.freeze(held, out, model="m", settings=settings)
    return out


def test_an_owner_that_is_asked_for_has_to_have_signed(
    frozen: Path, settings: config.Settings, tmp_path: Path
) -> None:
    key, other = namekey.load(settings), of_user(tmp_path / "other")
    for public in (key.owner, key.commitment("m")):
        found = thawed(frozen, settings=other, owner=f"ed25519:{public.hex()}")[1]
        assert not found.defined_by
    with pytest.raises(ConfigError, match="another key than its owner's"):
        stranger = namekey.load(other).owner.hex()
        thawed(frozen, settings=settings, owner=f"ed25519:{stranger}")


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


SPOILT: dict[str, tuple[Callable[[Path], object], type[MxError], str]] = {
    "a byte of the weights": (
        lambda s: flip(s / "rank0" / WEIGHTS, 9 * SECTOR_BYTES),
        DigestError,
        "do not match",
    ),
    "truncated weights": (
        lambda s: os.truncate(s / "rank0" / WEIGHTS, 5 * SECTOR_BYTES),
        CheckpointError,
        "truncated",
    ),
    "no weights": (lambda s: (s / "rank0" / WEIGHTS).unlink(), CheckpointError, "not there"),
    "another identity": (
        lambda s: changed(s / SNAPSHOT, lambda d: d["ranks"][0].update(identity="0" * 64)),
        CheckpointError,
        "signature",
    ),
    "another name": (
        lambda s: changed(s / SNAPSHOT, lambda d: d.update(model="n")),
        ConfigError,
        "snapshot of n",
    ),
    "a newer format": (
        lambda s: changed(s / SNAPSHOT, lambda d: d.update(format=2, mx="9.1")),
        CheckpointError,
        r"format 2.*reads 1.*mx '9\.1'",
    ),
    "not JSON": (lambda s: (s / SNAPSHOT).write_text("{"), CheckpointError, "not valid JSON"),
    "no ranks": (
        lambda s: changed(s / SNAPSHOT, lambda d: d.update(ranks=[])),
        CheckpointError,
        "ranks",
    ),
    "half of the ranks": (
        lambda s: changed(s / SNAPSHOT, lambda d: d["ranks"][0].update(variant=str(KEYS[0]))),
        CheckpointError,
        "not all those of one bundle",
    ),
    "a malformed shape": (
        lambda s: changed(
            s / SNAPSHOT, lambda d: d["ranks"][0].update(strides={"x": [[1, -1], [True, 1]]})
        ),
        CheckpointError,
        "not lists of integers",
    ),
    "no snapshot.json": (lambda s: (s / SNAPSHOT).unlink(), ConfigError, "not all were written"),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_spoilt_is_never_thawed(frozen: Path, settings: config.Settings, what: str) -> None:
    spoil, kind, said = SPOILT[what]
    spoil(frozen)
    with pytest.raises(kind, match=said):
        thawed(frozen, settings=settings)
    with pytest.raises(MxError):
        mx.serve(frozen / "rank0", model="m", coordinator="127.0.0.1:1", settings=settings)


def test_digests_that_lie_change_nothing(
    frozen: Path, settings: config.Settings, weights: Path
) -> None:
    flip(frozen / "rank0" / DIGESTS, (frozen / "rank0" / DIGESTS).stat().st_size - 1)
    expected = load_file(weights / "model.safetensors")
    assert same(thawed(frozen, settings=settings)[0], expected)
    (frozen / "rank0" / DIGESTS).unlink()
    assert same(thawed(frozen, settings=settings)[0], expected)


def test_unsigned_lies_about_strides_are_found(settings: config.Settings, tmp_path: Path) -> None:
    mx.freeze(state(1), tmp_path / "s", model="m", variant="odd", settings=settings)
    pin = read(tmp_path / "s").ranks[0].pin

    def lie(document: dict[str, Any]) -> None:
        del document["signature"], document["ranks"][0]["strides"]["model.layers.0.weight"]

    changed(tmp_path / "s" / SNAPSHOT, lie)
    for name in ("m", f"m@{pin}"):
        with pytest.raises(MxError):
            thawed(tmp_path / "s", name, settings=settings)


def done(run: Run, *arguments: str, code: int = 0) -> Command:
    command = run(*arguments)
    assert command.wait(60) == code, command.err
    return command


def serving(command: Command) -> None:
    command.until(lambda: "stop with Ctrl-C" in command.err, "serving")


def test_the_commands(run: Run, weights: Path, tmp_path: Path, coordinator: str) -> None:
    out, where = str(tmp_path / "s"), ("--coordinator", coordinator)
    source = serve(run, weights, "m", coordinator)
    report = done(run, "freeze", "m", out, *where, "--json").json()
    assert report["complete"] and report["signed"] and report["ranks"] == 1
    source.end()
    found = done(run, "thaw", out, f"m@{report['pins'][0]}", "--json").json()
    assert found["vouched_by"] == "pin" and found["ranks"][0]["verified"] == "digest"
    done(run, "thaw", out, "m@" + 16 * "0", code=4)
    done(run, "thaw", str(tmp_path), code=2)
    for verb in (("thaw", out, "--hold"), ("serve", out)):
        held = run(*verb, *where)
        serving(held)
        again = tmp_path / verb[0]
        done(run, "pull", f"m@{report['pins'][0]}", "--out", str(again), *where)
        assert same(
            load_file(again / "model.safetensors"), load_file(weights / "model.safetensors")
        )
        held.end()


@pytest.mark.parametrize("kinds", [["states", "snapshots"], ["states"]])
def test_a_lender_key_signs_what_its_owner_has_certified(
    settings: config.Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
) -> None:
    owner = namekey.load(settings)
    file = tmp_path / "user" / "lender.key"
    until_s = int(time.time()) + 3600
    file.write_bytes(namekey.LenderKey.issue(owner, ["m"], kinds, until_s))
    file.chmod(0o600)
    lender = config.given(settings, lender_key=str(file))
    if "snapshots" not in kinds:
        with pytest.raises(NotAllowedError, match="signs no snapshots of m"):
            mx.freeze(state(1), tmp_path / "s", model="m", variant="odd", settings=lender)
        return
    assert mx.freeze(state(1), tmp_path / "s", model="m", variant="odd", settings=lender).signed
    # Its owner knows it, and who has the same lender key.
    for reader in (settings, lender):
        assert not thawed(tmp_path / "s", settings=reader)[1].defined_by
    # One that has expired meanwhile counts no more.
    monkeypatch.setattr("mx.lenderkey.time", SimpleNamespace(time=lambda: until_s + 1.0))
    assert thawed(tmp_path / "s", settings=settings)[1].defined_by == "snapshot"


def test_it_is_a_step_before_the_disk(
    coordinator: str, settings: config.Settings, weights: Path, tmp_path: Path
) -> None:
    expected = load_file(weights / "model.safetensors")
    root, disk = tmp_path / "root", tmp_path / "disk"
    mx.freeze(expected, root / "m", model="m", settings=settings)
    (disk / "m").mkdir(parents=True)
    save_file(expected, disk / "m/model.safetensors")
    both = config.given(settings, snapshot_root=str(root), checkpoint_root=str(disk))
    how: Any = {"source": "auto", "coordinator": coordinator, "settings": both}
    with mx.pull("m", **how) as pull:
        found = {each.step: each.outcome for each in pull.wait(60).steps}
        assert same(pull.state_dict(), expected)
    assert (found["peers"], found["snapshot"], found["disk"]) == ("failed", "used", "not needed")
    # What is wrong in it comes from the next step, under what a pin or the coordinator says.
    name = f"m@{read(root / 'm').ranks[0].identity.hex()}"
    flip(root / "m/rank0" / WEIGHTS, 9 * SECTOR_BYTES)
    with mx.pull(name, **how) as pull:
        found = {each.step: each.outcome for each in pull.wait(60).steps}
        assert same(pull.state_dict(), expected)
    assert (found["snapshot"], found["disk"]) == ("partly", "used")


def test_each_byte_is_read_once(frozen: Path, settings: config.Settings, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    code = "import sys; from mx.cli import main; main()"
    calls = "trace=read,readv,pread64,preadv,preadv2,mmap"
    traced = ["strace", "-f", "-y", "-e", calls, "-o", str(tmp_path / "calls"), sys.executable]
    process = subprocess.run(
        [*traced, "-c", code, "thaw", str(frozen)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if "Operation not permitted" in process.stderr:
        pytest.skip("this container traces nothing")
    assert process.returncode == 0, process.stderr
    read_nbytes, begun = 0, set()
    for line in (tmp_path / "calls").read_text(errors="replace").splitlines():
        thread = line.split()[0]
        if WEIGHTS in line and "mmap(" in line:
            raise AssertionError(line)
        if WEIGHTS in line and "unfinished" in line:
            begun.add(thread)
        elif WEIGHTS in line or ("resumed" in line and thread in begun):
            begun.discard(thread)
            read_nbytes += int(line.rpartition("= ")[2].split()[0])
    # Beside the tensors the header, and what fills sectors.
    assert 1 <= read_nbytes / (frozen / "rank0" / WEIGHTS).stat().st_size < 1.02
