"""A folder arrives, or what is left out of it is named: by who serves it, who pulls it, and the
listing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mx.errors import EXIT_CONFIG, EXIT_OK
from tests.support.commands import Run, serve, start_coordinator
from tests.support.folders import tree

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TRAVELS = {
    "config.json": b'{"model_type": "llama"}',
    "bpe.codes": b"e s 12\n",
    "prophetnet.tokenizer": b"[PAD]\n",
    "tokenizer.model.v3": b"\x0a\x0e\xff",
    "vocab.txt": b"caf\xe9\n",
    "LICENSE": b"do as you like",
    "model.sig": b"{}",
}
STAYS = {
    "modeling.py": b"import os",
    "pytorch_model.bin": b"\x80\x02",
    ".gitattributes": b"*.bin",
    ".git/config": b"[remote]",
    "deep/a/b/c/config.json": b"{}",
    "net.onnx": b"x",
    "page.html": b"<p>",
}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    """Return the folder, with these files in it, and weights."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def missing(folder: Path, out: Path) -> set[str]:
    """Return what `diff -r` finds only in the first folder; fail if it finds anything else."""
    command = ["diff", "-r", "--no-dereference", str(folder), str(out)]
    found = set()
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        assert line.startswith("Only in "), line
        where, _, name = line.removeprefix("Only in ").partition(": ")
        path = Path(where, name)
        assert path.is_relative_to(folder), line
        inner = path.relative_to(folder).as_posix()
        found.add(inner + "/" if path.is_dir() and not path.is_symlink() else inner)
    return found


def covers(named: Iterable[str], absent: Iterable[str]) -> bool:
    """Return True if each absent path is named, or is a folder all of whose files are; and if
    nothing else is named."""
    names, gone = set(named), set(absent)
    for path in gone:
        if path not in names and not (
            path.endswith("/") and any(name.startswith(path) for name in names)
        ):
            return False
    return all(
        name in gone or any(path.endswith("/") and name.startswith(path) for path in gone)
        for name in names
    )


def named(answer: dict[str, Any]) -> dict[str, str]:
    return {each["path"]: each["reason"] for each in answer["left_out"]}


def test_what_is_missing_is_what_was_named(run: Run, tmp_path: Path) -> None:
    folder, out = written(tmp_path / "m", TRAVELS | STAYS), tmp_path / "out"
    save_file({"a": torch.ones(100, 100)}, folder / "model.safetensors")
    coordinator, _ = start_coordinator(run)
    source = run("serve", str(folder), "--model", "m", "--coordinator", coordinator, "--json")
    at_start = named(source.json())
    pulled = run("pull", "m", "--coordinator", coordinator, "--out", str(out), "--json")
    assert pulled.wait() == EXIT_OK
    at_end = named(pulled.json())
    assert at_start == at_end
    assert at_start[".git/"] == "is hidden"
    assert covers(at_end, missing(folder, out))
    assert set(tree(out)) == {*TRAVELS, "model.safetensors"}
    listed = run("models", "m", "--coordinator", coordinator, "--json")
    assert listed.wait() == EXIT_OK
    assert named(listed.json()["models"][0]) == at_start
    said = run("models", "m", "--coordinator", coordinator)
    assert said.wait() == EXIT_OK and "modeling.py" in said.out
    # A whole copy of what arrived has the same pin: nothing of what was left out is in it.
    again = serve(run, out, "m", coordinator).json()
    assert again["left_out"] == [] and again["pin"] == pulled.json()["pin"]


def test_a_link_to_a_private_key_never_travels(run: Run, tmp_path: Path) -> None:
    folder, home, out = tmp_path / "m", tmp_path / "home", tmp_path / "out"
    key = b"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n"
    written(home, {".ssh/id_rsa": key, "id.txt": key, "shared/config.json": b"{}"})
    written(folder, {".git/config": key, "id_rsa": key})
    save_file({"a": torch.ones(10)}, folder / "model.safetensors")
    links = {
        "a.json": home / ".ssh/id_rsa",
        "b.txt": home / "id.txt",
        "c.json": Path(".git/config"),
        "d.json": Path("id_rsa"),
        "config.json": home / "shared/config.json",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator, "--json")
    plain = run("serve", str(folder), "--model", "plain", *at)
    assert named(plain.json()).keys() == {*links, ".git/", "id_rsa"}
    followed = run("serve", str(folder), "--model", "followed", "--follow", str(home), *at)
    assert named(followed.json()).keys() == {*links, ".git/", "id_rsa"} - {"config.json"}
    pulled = run("pull", "followed", "--out", str(out), *at)
    assert pulled.wait() == EXIT_OK
    assert set(tree(out)) == {"model.safetensors", "config.json"}
    assert key not in b"".join(tree(out).values())
    refused = run("serve", str(folder), "--follow", str(home / "nowhere"), *at)
    assert refused.wait() == EXIT_CONFIG and "--follow" in refused.json()["error"]["hint"]


# -- companions -----------------------------------------------------------------------------------

DENSE, HEADS = "2_Dense/model.safetensors", "mtp.safetensors"
CONSOLIDATED = "consolidated.safetensors"


def weights(seed: int, *names: str, rows: int = 300) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: torch.randn(rows, 100) for name in names}


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """A folder whose weights are sharded, with companions and copies beside them."""
    folder = written(tmp_path / "m", TRAVELS | {"2_Dense/config.json": b"{}", "m.py": b"x"})
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
