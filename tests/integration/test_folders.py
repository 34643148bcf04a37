"""A folder arrives, or what is left out of it is named: by who serves it, who pulls it, and the
listing."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mx.errors import EXIT_CONFIG, EXIT_INTEGRITY, EXIT_OK
from tests.support.commands import Run, environment, serve, start_coordinator
from tests.support.folders import covers, missing, named, tree, written

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


def test_a_pipeline_names_what_none_of_its_models_has(run: Run, tmp_path: Path) -> None:
    files = {"model_index.json": b'{"unet": ["diffusers", "UNet"]}', "unet/config.json": b"{}"}
    folder = written(tmp_path / "m", files | {"x.py": b"x", "unet/y.py": b"y", "z/w.py": b"z"})
    save_file({"a": torch.ones(10)}, folder / "unet" / "model.safetensors")
    coordinator, _ = start_coordinator(run)
    at = ("--coordinator", coordinator, "--json")
    assert named(run("serve", str(folder), "--model", "m", *at).json()).keys() == {"x.py", "z/w.py"}
    listed = run("models", "m/unet", *at)
    assert listed.wait() == EXIT_OK
    assert named(listed.json()["models"][0]).keys() == {"y.py"}
    refused = run("serve", str(folder), "--weights", "*", *at)
    assert refused.wait() == EXIT_CONFIG


# -- Hugging Face's cache -------------------------------------------------------------------------


def test_blobs_are_compared_with_the_sha256_that_names_them(run: Run, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--o--m"
    snapshot = repository / "snapshots" / "c0ffee"
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(100, 100)}, tmp_path / "weights")
    data = (tmp_path / "weights").read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    (blobs / ("1" * 40)).write_text("{}")  # git's sha1: of small files
    (snapshot / "model.safetensors").symlink_to(blobs / digest)
    (snapshot / "config.json").symlink_to(blobs / ("1" * 40))
    coordinator, _ = start_coordinator(run)
    state, at = tmp_path / "state", ("--coordinator", coordinator, "--json")
    time.sleep(2.1)  # what was changed just now is compared again each time
    env = environment(XDG_STATE_HOME=str(state))
    served = run("serve", str(snapshot), "--model", "o/m", *at, env=env).json()
    assert served["hub"] == {
        "repository": "o/m",
        "commit": "c0ffee",
        "sha256": {"model.safetensors": digest},
    }
    index = state / "mx" / "blobs.json"
    assert digest in index.read_text()
    listed = run("models", "o/m", *at)
    assert listed.wait() == EXIT_OK
    assert listed.json()["models"][0]["hub"] == served["hub"]
    pulled = run("pull", "o/m", "--out", str(tmp_path / "out"), *at)
    assert pulled.wait() == EXIT_OK
    assert pulled.json()["hub"] == served["hub"]
    assert pulled.json()["pin"] == serve(run, tmp_path / "out", "n", coordinator).json()["pin"]
    (blobs / digest).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for _ in range(2):
        refused = run("serve", str(snapshot), "--model", "again", *at, env=env)
        assert refused.wait() == EXIT_INTEGRITY
        assert "is not what was downloaded" in refused.json()["error"]["message"]
