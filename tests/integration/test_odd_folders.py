"""Folders whose files disagree load from peers as transformers loads them from disk, with a line on
what is odd; only what is ambiguous is refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mx
from mx.engines import transformers as engine
from mx.errors import CheckpointError, ConfigError
from tests.support import families
from tests.support.daemon import daemon
from tests.support.folders import tree

pytestmark = pytest.mark.usefixtures("one_thread")

_INDEX = "model.safetensors.index.json"
_EMBED, _NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="module")
def coordinator() -> Iterator[str]:
    """A coordinator's address."""
    with daemon() as (_, address):
        yield address


class Folder:
    """A sharded checkpoint to spoil."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = families.FAMILIES["llama"]()
        families.scramble(model)
        model.save_pretrained(path, max_shard_size="20KB")
        self.index = json.loads((path / _INDEX).read_text())

    @property
    def map(self) -> dict[str, str]:
        """The index's weight map."""
        found: dict[str, str] = self.index["weight_map"]
        return found

    def shard(self, name: str) -> dict[str, torch.Tensor]:
        """Return what a tensor's shard holds."""
        return load_file(self.path / self.map[name])

    def put(self, tensors: dict[str, torch.Tensor], shard: str) -> None:
        """Write a shard."""
        save_file(tensors, self.path / shard, metadata={"format": "pt"})

    def done(self) -> None:
        """Write the index."""
        (self.path / _INDEX).write_text(json.dumps(self.index))


def _names_no_tensor(folder: Folder) -> None:
    shard = folder.shard(_NORM)
    del shard[_NORM]
    folder.put(shard, folder.map[_NORM])


def _names_a_stranger(folder: Folder) -> None:
    folder.map["model.rotary.inv_freq"] = folder.map[_NORM]


def _does_not_name(folder: Folder) -> None:
    del folder.map[_NORM]


def _names_the_other_shard(folder: Folder) -> None:
    folder.map[_NORM], folder.map[_EMBED] = folder.map[_EMBED], folder.map[_NORM]


def _twice(folder: Folder) -> None:
    folder.put(folder.shard(_EMBED) | {_NORM: folder.shard(_NORM)[_NORM]}, folder.map[_EMBED])


def _large_twice(folder: Folder) -> None:
    folder.put(folder.shard(_NORM) | {_EMBED: folder.shard(_EMBED)[_EMBED]}, folder.map[_NORM])


def _dotted(folder: Folder) -> None:
    for name, shard in folder.map.items():
        folder.map[name] = f"./{shard}"


def _empty_shard(folder: Folder) -> None:
    folder.put({}, "model-extra.safetensors")
    folder.map["nothing"] = "model-extra.safetensors"


_ODD: dict[str, tuple[Callable[[Folder], None], str]] = {
    "names no tensor": (_names_no_tensor, f"it names tensors that no file holds: '{_NORM}'"),
    "names a stranger": (_names_a_stranger, "it names tensors that no file holds"),
    "does not name": (_does_not_name, "it does not name tensors of model-"),
    "names the other shard": (_names_the_other_shard, "it names another file than holds a tensor"),
    "twice": (_twice, "holds, too, with the same bytes"),
    "large twice": (_large_twice, "holds, too, with the same bytes"),
    "dotted": (_dotted, "it writes a path with './'"),
    "empty shard": (_empty_shard, "it holds no tensors"),
}


def _from_disk(folder: Path) -> tuple[dict[str, torch.Tensor], Any]:
    automatic: Any = transformers.AutoModelForCausalLM
    model, said = automatic.from_pretrained(folder, output_loading_info=True)
    return model.state_dict(), said


@pytest.mark.parametrize("odd", list(_ODD))
def test_what_is_odd_travels_and_loads(
    odd: str, coordinator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, line = _ODD[odd]
    folder = Folder(tmp_path / "model")
    spoil(folder)
    folder.done()
    expected, disk = _from_disk(folder.path)
    name, out = odd.replace(" ", "-"), tmp_path / "out"
    caplog.set_level(logging.WARNING, "mx.storage")
    with closing(mx.serve(folder.path, model=name, coordinator=coordinator)):
        assert sum(line in record.getMessage() for record in caplog.records) == 1
        with mx.pull(name, coordinator=coordinator, out=out) as pull:
            pull.wait()
        assert tree(out) == tree(folder.path)
        loaded = engine.load(name, coordinator=coordinator, wait_s=60.0, strict=False).state_dict()
        assert list(loaded) == list(expected)
        for key, tensor in expected.items():
            # What no file holds is drawn at random, or ones.
            assert key in disk["missing_keys"] or torch.equal(loaded[key], tensor)
    from_file = mx.load(name, coordinator=coordinator, path=folder.path)
    assert all(torch.equal(from_file[key], expected[key]) for key in from_file if key in expected)


@pytest.mark.parametrize("odd", ["twice", "large twice"])
def test_a_tensor_with_other_bytes_in_two_shards_is_refused(
    odd: str, coordinator: str, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "model")
    _ODD[odd][0](folder)
    first, second = sorted([folder.map[_EMBED], folder.map[_NORM]])
    name = _NORM if odd == "twice" else _EMBED
    tensors = load_file(folder.path / second)
    tensors[name].view(-1)[-1] += 1
    folder.put(tensors, second)
    with pytest.raises(ConfigError) as caught:
        mx.serve(folder.path, model=name, coordinator=coordinator)
    assert f"'{name}' is in {first} and in {second} with other bytes (bytes " in str(caught.value)
    folder.put(tensors | {name: tensors[name].half()}, second)
    with pytest.raises(ConfigError, match="with another dtype or shape"):
        mx.serve(folder.path, model=name, coordinator=coordinator)


def test_a_doubled_key_is_refused_with_both_places(tmp_path: Path) -> None:
    one = '"a":{"dtype":"U8","shape":[2],"data_offsets":[%d,%d]}'
    header = f"{{{one % (0, 2)},{one % (2, 4)}}}".encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(CheckpointError, match=r"'a' comes twice.*\[0, 2\].* and .*\[2, 4\]"):
        mx.serve(path, model="doubled")
