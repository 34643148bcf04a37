"""What the rounds serve: small models whose bytes say which version they are, and what is expected
of them, computed without mx's code."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
#: The digest of each tensor's bytes, by name.
Print = tuple[tuple[str, str], ...]

MIB = 1 << 20


def shapes(rng: random.Random) -> dict[str, int]:
    """Return the tensors of a model by name, with their sizes in elements of 4 bytes."""
    layers = rng.randint(2, 5)
    large = rng.choice([MIB // 16, MIB // 2, MIB // 2])
    found = {"model.embed_tokens.weight": rng.randint(1, large)}
    for layer in range(layers):
        found[f"model.layers.{layer}.mlp.weight"] = large
        found[f"model.layers.{layer}.norm.weight"] = rng.choice([1, 7, 4096])
    return found


def make(sizes: Mapping[str, int], salt: int, version: int) -> Tensors:
    """Return tensors no two of which, of any salt and version, have equal blocks."""
    made = {}
    for index, (name, size) in enumerate(sizes.items()):
        values = torch.arange(size, dtype=torch.int32)
        made[name] = values * 64 + (salt * (MIB + 1) + version * 8191 + index * 131)
    return made


def print_of(tensors: Mapping[str, torch.Tensor]) -> Print:
    """Return what tells these weights from any others."""
    return tuple(sorted((name, _digest(tensor)) for name, tensor in tensors.items()))


def _digest(tensor: torch.Tensor) -> str:
    return blake3(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def write(
    folder: Path, tensors: Tensors, version: int, *, in_place: bool = False
) -> dict[str, bytes]:
    """Write a checkpoint, in place of the one that is there; with `in_place` into its very file.
    Returns its side files."""
    folder.mkdir(parents=True, exist_ok=True)
    new, path = folder / "new", folder / "model.safetensors"
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, new)
    if in_place:
        with path.open("r+b") as file:
            file.write(new.read_bytes())
        new.unlink()
    else:
        new.replace(path)
    config = json.dumps({"model_type": "llama", "version": version}).encode()
    (folder / "config.json").write_bytes(config)
    return {"config.json": config}


@dataclass
class Version:
    """Weights that a name has had, or may have got, and the files beside them."""

    number: int
    files: dict[str, bytes]


@dataclass
class Truth:
    """All that a name has meant, by what tells the weights apart, and the newest that it means."""

    versions: dict[Print, Version] = field(default_factory=dict)
    newest: int = -1  # the number of the last version that was published for certain
    #: The versions that were published for certain: by NAME:REVISION, and by identity.
    revisions: dict[str, Version] = field(default_factory=dict)
    identities: dict[str, Version] = field(default_factory=dict)

    def may_mean(self, tensors: Mapping[str, torch.Tensor], files: dict[str, bytes]) -> Print:
        """Record weights before they are published: from now on a reader may get them."""
        key = print_of(tensors)
        self.versions.setdefault(key, Version(len(self.versions), files))
        return key

    def means(self, key: Print, model: str, identity: str) -> None:
        """Record that they were published, under this NAME:REVISION."""
        version = self.versions[key]
        self.newest = version.number
        self.revisions[model] = self.identities[identity] = version

    def of(self, some: Print) -> list[Version]:
        """Return the versions that have all of these tensors."""
        return [each for key, each in self.versions.items() if set(some) <= set(key)]
