"""Companions: the further tensor files of a folder, which travel beside its main weights."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mx
from mx import config
from mx.errors import (
    EXIT_CONFIG,
    EXIT_INCOMPLETE,
    EXIT_INTEGRITY,
    EXIT_OK,
    UnknownModelError,
)
from mx.storage.safetensors import Checkpoint
from tests.support.commands import Run, serve, start_coordinator
from tests.support.folders import covers, missing, named, tree, written
from tests.support.outcomes import until
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SIDE = {"config.json": b'{"model_type": "llama"}', "2_Dense/config.json": b"{}", "m.py": b"x"}
DENSE, HEADS = "2_Dense/model.safetensors", "mtp.safetensors"
CONSOLIDATED = "consolidated.safetensors"


def weights(seed: int, *names: str, rows: int = 300) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(rows, 100) for name in names}


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A folder whose weights are sharded, with companions and copies beside them."""
    folder = written(tmp_path / "m", SIDE)
    shards = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]}
    of = {name: path for path, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": of}))
    for number, (path, names) in enumerate(shards.items()):
        save_file(weights(number, *names), folder / path, metadata={"format": "pt"})
    save_file(weights(2, "linear.weight"), folder / DENSE, metadata={"made": "by hand"})
    save_file(weights(3, "mtp.0", "mtp.1"), folder / HEADS)
    save_file(weights(4, "layers.0"), folder / CONSOLIDATED)
    save_file({k: v.half() for k, v in weights(0, "a").items()}, folder / "model.fp16.safetensors")
    return folder


COPIES = {CONSOLIDATED, "model.fp16.safetensors"}


def test_companions_arrive_beside_the_main_weights(
    run: Run, sentences: Path, tmp_path: Path
) -> None:
    out, main = tmp_path / "out", tmp_path / "main"
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    source = run("serve", str(sentences), "--model", "m", *at, "--json").json()
    assert named(source).keys() == {*COPIES, "m.py"}
    assert source["main"] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    pulled = run("pull", "m", *at, "--out", str(out), "--json")
    assert pulled.wait() == EXIT_OK, pulled.err
    assert covers(named(pulled.json()), missing(sentences, out))
    assert {each["path"] for each in pulled.json()["companions"]} == {DENSE, HEADS}
    listed = run("models", *at, "--json")
    assert listed.wait() == EXIT_OK
    assert [each["variant"] for each in listed.json()["models"]] == ["checkpoint"]
    verified = run("verify", str(out), source["pin"])
    assert verified.wait() == EXIT_OK, verified.err
    again = run("serve", str(out), "--model", "m", *at, "--json").json()
    assert again["pin"] == source["pin"] and named(again) == {}
    alone = run("pull", "m", *at, "--out", str(main), "--main")
    assert alone.wait() == EXIT_OK
    assert f"without its companions, as --main asks: {HEADS}, {DENSE}" in alone.out
    assert not {DENSE, HEADS} & set(tree(main))
    assert set(tree(out)) - set(tree(main)) == {DENSE, HEADS}


def test_a_bare_name_is_never_a_companion(
    run: Run, sentences: Path, settings: config.Settings
) -> None:
    coordinator, _ = start_coordinator(run)
    at: dict[str, Any] = {"coordinator": coordinator, "settings": settings}
    main = weights(0, "a") | weights(1, "b")
    with mx.serve(sentences, model="m", variant="word", **at) as source:
        for where in (at, {"peer": source.endpoint, "settings": settings}):
            assert same(mx.load("m", **where), main)
            dense = mx.load("m", companion=DENSE, **where)
            assert same(dense, load_file(sentences / DENSE))
            heads = mx.load(f"m[beside=word,companion={HEADS}]", **where)
            assert same(heads, load_file(sentences / HEADS))
            with pytest.raises(UnknownModelError, match="no companion nowhere") as raised:
                mx.load("m", companion="nowhere.safetensors", **where)
            assert HEADS in raised.value.hint
        on_disk = mx.load("m", path=sentences, companion=DENSE, settings=settings)
        assert same(on_disk, load_file(sentences / DENSE))
    # A source that has nothing but a companion: a name alone is none.
    with mx.serve(sentences / HEADS, model="n", variant="companion=x.safetensors", **at) as alone:
        for where in (at, {"peer": alone.endpoint, "settings": settings}):
            with pytest.raises(UnknownModelError):
                mx.load("n", wait_s=0, **where)
        assert not mx.list_models(**at)


def test_companions_are_not_put_into_memory_for_the_main_weights(
    run: Run, sentences: Path, tmp_path: Path, settings: config.Settings
) -> None:
    coordinator, _ = start_coordinator(run)
    at: dict[str, Any] = {"coordinator": coordinator, "settings": settings}
    with mx.serve(sentences, model="m", **at) as source:
        buffer = bytearray(source.manifest.layout.arena_nbytes)
        module = {name: torch.zeros(300, 100) for name in "ab"}
        for into, out in ((buffer, tmp_path / "1"), (module, tmp_path / "2")):
            with mx.pull("m", into=into, out=out, **at) as pull:
                pull.wait()
            assert covers(source.notes.left_out, missing(sentences, out))
        assert same(module, weights(0, "a") | weights(1, "b"))
        assert bytes(buffer) == bytes(source.buffer())


def test_the_coordinator_ends_between_the_main_weights_and_a_companion(
    run: Run, sentences: Path, tmp_path: Path
) -> None:
    save_file(weights(5, "a", rows=20_000), sentences / "model.safetensors")
    coordinator, daemon = start_coordinator(run)
    serve(run, sentences, "m", coordinator, "--max-bandwidth", "4MB/s")
    out, at = tmp_path / "out", ("--coordinator", coordinator)
    pull = run("pull", "m", *at, "--transport", "tcp", "--out", str(out), "--json")
    until((tmp_path / ".out.mx-partial").exists, "the first bytes")
    daemon.end()
    assert pull.wait(90) == EXIT_OK, pull.err
    assert {DENSE, HEADS} <= set(tree(out))


def test_main_weights_without_a_companion_are_incomplete(
    run: Run, sentences: Path, tmp_path: Path
) -> None:
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    source = serve(run, sentences, "m", coordinator)
    relay = run("pull", "m", *at, "--hold", "--log-level", "warning")
    until(lambda: "serving m" in relay.err, "the relay")
    assert "without its companions" in relay.err
    source.end()
    out = tmp_path / "out"
    pull = run("pull", "m", *at, "--out", str(out), "--json")
    assert pull.wait() == EXIT_INCOMPLETE
    assert f"its companion {HEADS} is not" in pull.json()["error"]["message"]
    assert not out.exists()
    # Back again: the main weights are there already.
    serve(run, sentences, "m", coordinator)
    again = run("pull", "m", *at, "--out", str(out), "--json")
    assert again.wait() == EXIT_OK, again.err
    assert "resume" in [path["transport"] for path in again.json()["paths"]]
    assert covers(named(again.json()), missing(sentences, out))


def test_a_pull_that_was_killed_among_companions_goes_on(
    run: Run, sentences: Path, tmp_path: Path
) -> None:
    save_file(weights(6, "linear.weight", rows=40_000), sentences / DENSE)
    coordinator, _ = start_coordinator(run)
    source = serve(run, sentences, "m", coordinator, "--max-bandwidth", "4MB/s")
    out, at = tmp_path / "out", ("--coordinator", coordinator, "--transport", "tcp")
    partial = tmp_path / ".out.mx-partial" / "companions"
    pull = run("pull", "m", *at, "--out", str(out))
    until((partial / "0").exists, "the first companion", 60)
    until((partial / ".1.mx-partial").exists, "the second companion", 60)
    pull.signal(signal.SIGKILL)
    pull.wait()
    assert not out.exists()
    source.end()
    serve(run, sentences, "m", coordinator)
    again = run("pull", "m", *at, "--out", str(out), "--json")
    assert again.wait() == EXIT_OK, again.err
    found = again.json()
    assert found["companions"][0]["sources"] == []
    assert [path["transport"] for path in found["paths"]] == ["resume"]
    assert covers(named(found), missing(sentences, out))
    assert not partial.parent.exists()
    verified = run("verify", str(out))
    assert verified.wait() == EXIT_OK, verified.err
    with open(out / DENSE, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0\0")
    wrong = run("verify", str(out), "--json")
    assert wrong.wait() == EXIT_INTEGRITY


def test_a_source_that_says_companions_have_companions(
    run: Run,
    sentences: Path,
    tmp_path: Path,
    settings: config.Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, _ = start_coordinator(run)
    at: dict[str, Any] = {"coordinator": coordinator, "settings": settings}
    honest = Checkpoint.companion

    def lying(self: Checkpoint, path: str) -> Checkpoint:
        rest = tuple(each for each in self.companions if each[0] > path)
        return replace(honest(self, path), companions=rest)

    monkeypatch.setattr(Checkpoint, "companion", lying)
    monkeypatch.setattr(
        "mx.source.model.companion_variant", lambda variant, path: f"companion={path}"
    )
    out = tmp_path / "out"
    with mx.serve(sentences, model="m", **at), mx.pull("m", out=out, **at) as pull:
        asked = {each.path for each in pull.wait().companions}
    assert asked == {DENSE, HEADS} <= set(tree(out))


def test_updates_keep_as_many_sources_as_there_are_files(
    run: Run, sentences: Path, tmp_path: Path, settings: config.Settings
) -> None:
    coordinator, _ = start_coordinator(run)
    at: dict[str, Any] = {"coordinator": coordinator, "settings": settings}
    with mx.serve(sentences, model="m", **at) as source:
        for number in range(10, 14):
            shard = sentences / "model-00001-of-00002.safetensors"
            save_file(weights(number, "a"), shard)
            save_file(weights(number, "mtp.0", "mtp.1"), sentences / HEADS)
            source.update(sentences, grace_s=0)
            assert same(mx.load("m", companion=HEADS, **at), load_file(sentences / HEADS))
            assert same(mx.load("m", companion=DENSE, **at), load_file(sentences / DENSE))
            assert len(mx.list_sources("m", **at)) == 3
        out = tmp_path / "out"
        with mx.pull("m", out=out, **at) as pull:
            pull.wait()
        assert covers(source.notes.left_out, missing(sentences, out))
    assert not mx.list_sources(**at)


def test_two_sources_of_one_folder_and_one_of_another(
    run: Run, sentences: Path, tmp_path: Path
) -> None:
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    first = serve(run, sentences, "m", coordinator)
    serve(run, sentences, "m", coordinator)
    other = tmp_path / "other"
    pull = run("pull", "m", *at, "--out", str(other))
    assert pull.wait() == EXIT_OK, pull.err
    save_file(weights(9, "linear.weight"), other / DENSE)  # the same main weights
    lies = serve(run, other, "m", coordinator).json()
    assert lies["pin"] != first.json()["pin"] and lies["identity"] == first.json()["identity"]
    first.end()
    pins = {first.json()["pin"]: sentences, lies["pin"]: other}
    for number, (pin, folder) in enumerate(pins.items()):
        out = tmp_path / str(number)
        pull = run("pull", f"m@{pin}", *at, "--out", str(out))
        assert pull.wait() == EXIT_OK, pull.err
        assert tree(out)[DENSE] == tree(folder)[DENSE]


def test_copies_travel_when_they_are_asked_for(run: Run, sentences: Path, tmp_path: Path) -> None:
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator)
    refused = run("serve", str(sentences), *at, "--weights", "*.ema*", "--json")
    assert refused.wait() == EXIT_CONFIG
    assert "--weights" in refused.json()["error"]["message"]
    source = serve(run, sentences, "m", coordinator, "--weights", "*.fp16.*").json()
    assert named(source).keys() == {CONSOLIDATED, "m.py"}
    out = tmp_path / "out"
    pull = run("pull", "m", *at, "--out", str(out), "--json")
    assert pull.wait() == EXIT_OK, pull.err
    assert covers(named(pull.json()), missing(sentences, out))
    for pin in ((), (source["pin"],)):
        verified = run("verify", str(out), *pin)
        assert verified.wait() == EXIT_OK, verified.err
    (out / "model.fp16.safetensors").write_bytes((sentences / HEADS).read_bytes())
    assert run("verify", str(out)).wait() == EXIT_INTEGRITY


def test_a_folder_on_disk(run: Run, sentences: Path, tmp_path: Path) -> None:
    disk, out = f"disk={sentences}", tmp_path / "out"
    pull = run("pull", "m", "--from", disk, "--out", str(out), "--json")
    assert pull.wait() == EXIT_OK, pull.err
    assert covers(named(pull.json()), missing(sentences, out))
    pinned = f"m@{pull.json()['pin']}"
    again = run("pull", pinned, "--from", disk, "--out", str(tmp_path / "main"), "--main")
    assert again.wait() == EXIT_OK, again.err
    assert not {DENSE, HEADS} & set(tree(tmp_path / "main"))
    verified = run("verify", str(tmp_path / "main"))
    assert verified.wait() == EXIT_OK, verified.err
    refused = run("pull", "m", "--from", disk, "--main")
    assert refused.wait() == EXIT_CONFIG
