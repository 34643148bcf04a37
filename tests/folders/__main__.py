"""`make folders`: compares `diff -r` with `left_out` for random folders."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import mx
from mx import config
from mx.errors import MxError
from tests.support.commands import commands, start_coordinator
from tests.support.folders import covers, missing, tree

_NAMES = (
    "config.json", "tokenizer.json", "vocab.txt", "merges.txt", "LICENSE", "README.md", "README",
    "bpe.codes", "prophetnet.tokenizer", "tokenizer.model", "tokenizer.model.v3", "model.sig",
    "spiece.model", "word2vec.model", "modeling.py", "pytorch_model.bin", "net.onnx", ".hidden",
    "page.html", "weird name.json", "é.txt", "a:b.json", "x.json.bak", "m.h5", "CONFIG.JSON",
)  # fmt: skip
_FOLDERS = ("", "", "", "2_Dense/", "1_Pooling/", "deep/a/b/", "deep/a/b/c/", ".git/", "onnx/")
_TENSORS = ("a.safetensors", "mtp.safetensors", "consolidated.safetensors", "model.ema.safetensors")
_CONTENTS = (b"{}", b"text\n", b"caf\xe9\n", b"\x80\x04", b"#!/bin/sh\n", b"", b"a\0b")


def random_folder(root: Path, choose: random.Random) -> None:
    """Fill a folder with weights, and with files, links and folders of many kinds.

    Args:
        root: The folder, which is there.
        choose: Where it takes its choices from.
    """
    main = {f"t{i}": torch.randn(choose.randint(0, 40), 3) for i in range(choose.randint(1, 4))}
    main["last"] = torch.randn(5, 3)
    if choose.random() < 0.5:
        save_file(main, root / "model.safetensors")
    else:
        shards = ("model-1.safetensors", "model-2.safetensors")
        of = {name: choose.choice(shards) for name in main}
        for shard in set(of.values()):
            save_file({n: t for n, t in main.items() if of[n] == shard}, root / shard)
        index = {"metadata": {}, "weight_map": of}
        (root / "model.safetensors.index.json").write_text(json.dumps(index))
    for _ in range(choose.randint(0, 4)):
        path = root / choose.choice(_FOLDERS) / choose.choice(_TENSORS)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = choose.random()
        if kind < 0.3:
            save_file({name: tensor.half() for name, tensor in main.items()}, path)
        elif kind < 0.9:
            save_file({"other": torch.randn(choose.randint(0, 9), 2)}, path)
        else:
            path.write_bytes(choose.choice(_CONTENTS))
    for _ in range(choose.randint(0, 25)):
        path = root / choose.choice(_FOLDERS) / choose.choice(_NAMES)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() or path.is_symlink():
            continue
        kind = choose.random()
        if kind < 0.75:
            path.write_bytes(choose.choice(_CONTENTS))
        elif kind < 0.8:
            path.mkdir()
        else:
            targets = ("config.json", "nowhere", "/etc/passwd", ".git/.hidden", ".", "modeling.py")
            path.symlink_to(choose.choice(targets))


def check(seed: int, place: Path, settings: config.Settings, coordinator: str) -> None:
    """Serve and pull one random folder.

    Raises:
        AssertionError: The copy lacks what was not named, or has other content.
    """
    choose = random.Random(seed)
    torch.manual_seed(seed)
    folder, out = place / "m", place / "out"
    folder.mkdir()
    random_folder(folder, choose)
    at = f"m{seed}"
    with mx.serve(folder, model=at, coordinator=coordinator, settings=settings) as source:
        said = source.notes.left_out
        with mx.pull(at, out=out, coordinator=coordinator, settings=settings) as pull:
            report = pull.wait()
        assert report.folder.left_out == said
    absent = missing(folder, out)
    assert covers(said, absent), f"named {sorted(said)}, missing {sorted(absent)}"
    there = tree(folder)
    for path, data in tree(out).items():
        assert path.endswith(".safetensors") or there[path] == data, path
    with mx.serve(out, model=at, coordinator=coordinator, settings=settings) as again:
        assert not again.notes.left_out
        assert again.pinned == source.pinned


def main() -> int:
    """Check many folders. Returns the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.folders", description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    settings, failed = config.load({}), 0
    with commands() as run:
        coordinator, _ = start_coordinator(run)
        for seed in range(asked.seed, asked.seed + asked.count):
            place = Path(tempfile.mkdtemp())
            try:
                check(seed, place, settings, coordinator)
            except (AssertionError, MxError) as error:
                failed += 1
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
            finally:
                shutil.rmtree(place)
    print(f"{asked.count} folders, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
