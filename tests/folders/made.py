"""Random folders: weights of many dtypes, shards, indices that are odd, further files and links."""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_INDEX = "model.safetensors.index.json"
_SHARDS = ("model-1.safetensors", "model-2.safetensors", "sub/model-3.safetensors")
_NAMES = (
    "config.json", "tokenizer.json", "vocab.txt", "merges.txt", "LICENSE", "README.md", "README",
    "bpe.codes", "prophetnet.tokenizer", "tokenizer.model", "tokenizer.model.v3", "model.sig",
    "spiece.model", "word2vec.model", "modeling.py", "pytorch_model.bin", "net.onnx", ".hidden",
    "page.html", "weird name.json", "é.txt", "a:b.json", "x.json.bak", "m.h5", "CONFIG.JSON",
)  # fmt: skip
_FOLDERS = ("", "", "", "2_Dense/", "1_Pooling/", "deep/a/b/", "deep/a/b/c/", ".git/", "onnx/")
_TENSORS = ("a.safetensors", "mtp.safetensors", "consolidated.safetensors", "model.ema.safetensors")
_CONTENTS = (b"{}", b"text\n", b"caf\xe9\n", b"\x80\x04", b"#!/bin/sh\n", b"", b"a\0b")
_SHAPES = ((), (0, 3), (0,), (1,), (2, 2), (7, 2), (3, 1, 2), (40, 6))
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.int8, torch.uint8, torch.bool, torch.int16, torch.uint32, torch.int64, torch.complex64,
)  # fmt: skip

Tensors = dict[str, torch.Tensor]


def _tensor(choose: random.Random) -> torch.Tensor:
    dtype, shape = choose.choice(_DTYPES), choose.choice(_SHAPES)
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    if dtype is torch.float4_e2m1fn_x2 and not shape:  # half a byte, which safetensors refuses
        shape = (1,)
    wide = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return wide.view(dtype).reshape(shape)


def some_tensors(choose: random.Random, most: int) -> Tensors:
    """Return tensors of random dtypes and shapes: scalars, empty ones, of less than a byte each."""
    return {f"t.{i}": _tensor(choose) for i in range(choose.randint(0, most))}


def _metadata(choose: random.Random) -> dict[str, str]:
    more = {"b": "café", "a": '{"x": "\\n"}', "version": "\x7f\u2028"}
    keys = choose.sample(list(more), choose.choice((0, 0, 1, 3)))
    return {"format": "pt"} | {key: more[key] for key in keys}


class Weights:
    """The main weights of a folder: one file, or shards and their index.

    `spoilt` says what makes the folder one that is refused; "" for any other.
    """

    def __init__(self, root: Path, tensors: Tensors, choose: random.Random) -> None:
        """
        Args:
            root: The folder.
            tensors: What they hold.
            choose: Where it takes its choices from.
        """
        self._root, self._choose = root, choose
        self.odd: list[str] = []
        self.spoilt = ""
        self._shards: dict[str, Tensors] = {}
        self._map: dict[str, Any] = {}
        if choose.random() < 0.4:
            save_file(tensors, root / "model.safetensors", metadata=_metadata(choose))
            if choose.random() < 0.1:
                self._break_file(root / "model.safetensors")
            return
        for name, tensor in tensors.items():
            shard = choose.choice(_SHARDS)
            self._map[name] = shard
            self._shards.setdefault(shard, {})[name] = tensor
        for odd in choose.sample(_ODDITIES, choose.choice((0, 0, 1, 2, 3))):
            odd(self)
            self.odd.append(odd.__name__)
        if choose.random() < 0.12:
            spoil = choose.choice(_SPOILERS)
            if spoil(self):
                self.spoilt = spoil.__name__
        for shard, held in self._shards.items():
            (root / shard).parent.mkdir(exist_ok=True)
            save_file(held, root / shard, metadata=_metadata(choose))
        (root / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._map}))
        if not self.spoilt and choose.random() < 0.05:
            self._break_file(root / choose.choice(list(self._shards)))

    def _any(self) -> tuple[str, str, torch.Tensor]:
        """Return a tensor, and the shard that holds it."""
        shard = self._choose.choice([shard for shard, held in self._shards.items() if held])
        name = self._choose.choice(list(self._shards[shard]))
        return shard, name, self._shards[shard][name]

    def _other(self, shard: str) -> str:
        """Return another shard, which the index names."""
        other = self._choose.choice([each for each in _SHARDS if each != shard])
        self._shards.setdefault(other, {"other": torch.ones(1)})
        self._map.setdefault(f"in.{other}", other)
        return other

    # -- odd, and taken ---------------------------------------------------------------------------

    def _names_a_stranger(self) -> None:
        self._map["stranger"] = self._any()[0]

    def _lacks_a_tensor(self) -> None:
        shard, name, _ = self._any()
        self._shards[shard].pop(name)
        self._shards[shard]["kept"] = torch.ones(2)

    def _does_not_name(self) -> None:
        shard, name, _ = self._any()
        self._map["in." + shard] = shard
        self._map.pop(name, None)

    def _names_the_other(self) -> None:
        shard, name, _ = self._any()
        self._map["in." + shard] = shard
        self._map[name] = self._other(shard)

    def _holds_twice(self) -> None:
        shard, name, tensor = self._any()
        self._shards[self._other(shard)][name] = tensor.clone()

    def _dots(self) -> None:
        for name in self._choose.sample(list(self._map), len(self._map) // 2):
            self._map[name] = "./" + self._map[name].replace("/", "/./")

    def _empty_shard(self) -> None:
        self._shards["model-4.safetensors"] = {}
        self._map["nothing"] = "model-4.safetensors"

    # -- refused; True if the weights could be spoilt so ------------------------------------------

    def _other_bytes(self) -> bool:
        shard, name, tensor = self._any()
        if not tensor.numel():
            return False
        other = tensor.contiguous().reshape(-1).view(torch.uint8).clone()
        other[self._choose.randrange(len(other))] ^= 1
        self._shards[self._other(shard)][name] = other.view(tensor.dtype).reshape(tensor.shape)
        return True

    def _other_shape(self) -> bool:
        shard, name, tensor = self._any()
        self._shards[self._other(shard)][name] = torch.zeros(*tensor.shape, 1, dtype=torch.int32)
        return True

    def _climbs(self) -> bool:
        self._map["climber"] = self._choose.choice(("../x.safetensors", "/etc/x.safetensors"))
        return True

    def _is_missing(self) -> bool:
        self._map["missing"] = "model-9.safetensors"
        return True

    def _is_no_path(self) -> bool:
        self._map["number"] = self._choose.choice((7, None, "", [], "model-1.bin"))
        return True

    def _break_file(self, path: Path) -> None:
        """Make a file one that no reader takes: cut it, or write a key in its header twice."""
        data = path.read_bytes()
        if self._choose.random() < 0.5:
            self.spoilt, broken = "cut", data[: self._choose.randrange(len(data))]
        else:
            nbytes = int.from_bytes(data[:8], "little")
            header = data[8 : 8 + nbytes].rstrip()
            twice = b'{"k":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},' * 2
            header = twice.replace(b",{", b",") + header[1:]
            broken = len(header).to_bytes(8, "little") + header + data[8 + nbytes :]
            self.spoilt = "twice in a header"
        path.write_bytes(broken)


_ODDITIES: tuple[Callable[[Weights], None], ...] = (
    Weights._names_a_stranger, Weights._lacks_a_tensor, Weights._does_not_name,
    Weights._names_the_other, Weights._holds_twice, Weights._dots, Weights._empty_shard,
)  # fmt: skip
_SPOILERS: tuple[Callable[[Weights], bool], ...] = (
    Weights._other_bytes, Weights._other_shape, Weights._climbs, Weights._is_missing,
    Weights._is_no_path,
)  # fmt: skip


def main_tensors(root: Path) -> Tensors:
    """Return what the main weights of a folder hold, as safetensors reads them."""
    if (root / "model.safetensors").exists():
        return load_file(root / "model.safetensors")
    shards = set(json.loads((root / _INDEX).read_text())["weight_map"].values())
    found: Tensors = {}
    for shard in shards:
        found.update(load_file(root / shard))
    return found


def into_blobs(root: Path, repository: Path, choose: random.Random) -> Path:
    """Move a folder into Hugging Face's cache: a snapshot of links to blobs.

    Args:
        root: The folder.
        repository: The repository's folder in the cache, which is not there.
        choose: Where it takes its choices from.

    Returns:
        The snapshot.
    """
    blobs = repository / "blobs"
    snapshot = repository / "snapshots" / f"{choose.getrandbits(160):040x}"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    root.rename(snapshot)
    for path in sorted(snapshot.rglob("*")):
        if path.is_file() and not path.is_symlink():
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            path.replace(blob)
            path.symlink_to(os.path.relpath(blob, path.parent))
    return snapshot


def add_files(root: Path, main: Tensors, choose: random.Random) -> None:
    """Add files, links and folders of many kinds: companions, copies of the weights, side files.

    Args:
        root: The folder.
        main: What its main weights hold.
        choose: Where it takes its choices from.
    """
    for _ in range(choose.randint(0, 4)):
        path = root / choose.choice(_FOLDERS) / choose.choice(_TENSORS)
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = choose.random()
        if kind < 0.3:
            copied = {name: torch.zeros(tensor.shape).half() for name, tensor in main.items()}
            save_file(copied, path)
        elif kind < 0.9:
            save_file({"other": _tensor(choose), **some_tensors(choose, 5)}, path)
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
