"""Checkpoints as they are found on disk: which are read, and what is wrong with the others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from benchmarks.roots import root_of
from mx.core.manifest import decode, encode, plan_layout
from mx.core.packaging import bad_side_content, bad_side_path
from mx.core.types import DTYPE_BITS
from mx.errors import CheckpointError, ConfigError
from mx.storage.header import header_bytes, parse_header
from mx.storage.safetensors import open_checkpoint
from mx.storage.side_files import read_side_file, resolved_folders, walk
from tests.support.checkpoints import content, loaded, tiny
from tests.support.crafted import crafted, entry, raw_file

deserialize: Any = safetensors.deserialize
ONE = entry("U8", [2], 0)
META = "__metadata__"


def put(folder: Path, data: bytes, name: str = "model.safetensors") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def names_of(path: Path) -> set[str]:
    return {spec.name for spec in open_checkpoint(path).specs}


# -- headers --------------------------------------------------------------------------------------

# What the library rejects, and why it or we do.
REJECTED: dict[str, bytes] = {
    "empty file": b"",
    "no length": b"\1\0\0",
    "cut in the header": raw_file({"a": ONE}, b"xx")[:20],
    "cut in the data": raw_file({"a": ONE}, b"x"),
    "extra bytes": raw_file({"a": ONE}, b"xxx"),
    "length beyond the file": (1 << 20).to_bytes(8, "little") + b"{}",
    "length of 100 MB and more": (100_000_001).to_bytes(8, "little") + b"{}",
    "length of 2^64 - 1": b"\xff" * 8 + b"{}",
    "no JSON": raw_file(b"hello, world"),
    "an array": raw_file(b"[]"),
    "NUL padding": raw_file(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}\0'),
    "bad UTF-8": raw_file(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "half a surrogate": raw_file(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "deep nesting": raw_file(b'{"a":' + b"[" * 50_000),
    "dtype unknown": raw_file({"a": {"dtype": "F128", "shape": [], "data_offsets": [0, 16]}}),
    "dtype a number": raw_file({"a": {"dtype": 1, "shape": [], "data_offsets": [0, 0]}}),
    "dtype missing": raw_file({"a": {"shape": [0], "data_offsets": [0, 0]}}),
    "dtype twice": raw_file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "shape negative": raw_file({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}}),
    "shape minus zero": raw_file(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}'),
    "shape a float": raw_file({"a": {"dtype": "U8", "shape": [0.0], "data_offsets": [0, 0]}}),
    "shape true": raw_file({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"),
    "shape NaN": raw_file(b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,0]}}'),
    "shape overflows": raw_file(
        {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]}}
    ),
    "shape of 5000 digits": raw_file(
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'
    ),
    "offsets swapped": raw_file({"a": {"dtype": "U8", "shape": [0], "data_offsets": [1, 0]}}, b"x"),
    "offsets of three": raw_file({"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0, 0]}}),
    "offsets unfit": raw_file({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 1]}}, b"x"),
    "offsets beyond": raw_file({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}),
    "hole": raw_file({"a": ONE, "b": entry("U8", [1], 3)}, b"xxxx"),
    "hole in front": raw_file({"a": entry("U8", [2], 1)}, b"xxx"),
    "overlap": raw_file({"a": ONE, "b": entry("U8", [2], 1)}, b"xxx"),
    "one range twice": raw_file({"a": ONE, "b": ONE}, b"xx"),
    "half a byte": raw_file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, b"xx"),
    "metadata a number": raw_file({META: {"a": 1}, "a": ONE}, b"xx"),
    "metadata a string": raw_file({META: "a", "a": ONE}, b"xx"),
}  # fmt: skip

# What the library accepts, and no honest writer makes.
STRICTER: dict[str, bytes] = {
    "no tensors": raw_file({}),
    "leading space": raw_file(b' {"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "metadata alone": raw_file({META: {"format": "pt"}}),
    "duplicate key": raw_file(
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
        b'"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b"xx",
    ),
    "duplicate metadata": raw_file(
        b'{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "name that climbs": raw_file({"../../x": ONE}, b"xx"),
    "name that climbs the other way": raw_file({"a\\..\\x": ONE}, b"xx"),
    "name empty": raw_file({"": ONE}, b"xx"),
    "name with NUL": raw_file({"a\0b": ONE}, b"xx"),
    "field unknown": raw_file({"a": ONE | {"compression": "zstd"}}, b"xx"),
    "dimension absurd": raw_file(
        {"a": {"dtype": "U8", "shape": [0, 1 << 60], "data_offsets": [0, 0]}}
    ),
}


@pytest.mark.parametrize("data", REJECTED.values(), ids=REJECTED.keys())
def test_what_the_library_rejects_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(safetensors.SafetensorError):
        deserialize(data)
    path = put(tmp_path, data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("data", STRICTER.values(), ids=STRICTER.keys())
def test_what_the_library_should_reject_is_refused(data: bytes, tmp_path: Path) -> None:
    deserialize(data)
    path = put(tmp_path, data)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_endless_names_do_not_make_endless_messages(tmp_path: Path) -> None:
    put(tmp_path, raw_file({"n" * 1_000_000: {"dtype": "U8"}}))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("pad", range(9))
def test_a_misaligned_start_is_ordinary(pad: int, tmp_path: Path) -> None:
    put(tmp_path, crafted([("a", "F32", [1], b"abcd")], pad=pad))
    tensor = open_checkpoint(tmp_path).files[0].tensors[0]
    assert (tmp_path / "model.safetensors").read_bytes()[tensor.begin : tensor.end] == b"abcd"


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_scalars_and_empty_tensors(dtype: str, tmp_path: Path) -> None:
    bits = DTYPE_BITS[dtype]
    tensors = [("full", dtype, [8, 3], bytes(range(3 * bits))), ("none", dtype, [2, 0, 3], b"")]
    if bits >= 8:
        tensors.append(("scalar", dtype, [], b"\1" * (bits // 8)))
    data = crafted(tensors, {"format": "pt"})
    library = {name: info for name, info in deserialize(data)}
    put(tmp_path, data)
    found = open_checkpoint(tmp_path).files[0].tensors
    assert {t.spec.name for t in found} == library.keys()
    for tensor in found:
        info: Any = library[tensor.spec.name]
        assert (tensor.spec.dtype, list(tensor.spec.shape)) == (info["dtype"], info["shape"])
        assert data[tensor.begin : tensor.end] == bytes(info["data"])


def test_headers_are_written_as_the_library_writes_them(tmp_path: Path) -> None:
    tensors = {"é.w": torch.zeros(3, dtype=torch.bfloat16), 'a"\\': torch.ones(2, 2)}
    tensors |= {"none": torch.zeros(0), "scalar": torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "model.safetensors").read_bytes()
    file = open_checkpoint(tmp_path).files[0]
    header = header_bytes([t.spec for t in file.tensors], file.metadata)
    assert data.startswith(header)
    assert parse_header(header[8:], file.location, len(data)) == (file.metadata, file.tensors)


# -- folders --------------------------------------------------------------------------------------


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    tiny("llama").save_pretrained(folder, max_shard_size="20KB")
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def edit_index(folder: Path, **changes: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for name, shard in changes.items():
        name = name.replace("__", ".")
        if shard is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


def test_one_file_by_name(tmp_path: Path) -> None:
    path = put(tmp_path, crafted([("a", "U8", [1], b"x")]), "weights.safetensors")
    (tmp_path / "private.txt").write_text("not part of it")
    checkpoint = open_checkpoint(path)
    assert [file.path for file in checkpoint.files] == ["weights.safetensors"]
    assert checkpoint.packaging.side_files == ()


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 2
    assert {spec.name for spec in checkpoint.specs} == tensors.keys()
    paths = [side.path for side in checkpoint.packaging.side_files]
    assert paths == ["config.json", "generation_config.json", "model.safetensors.index.json"]
    for side in checkpoint.packaging.side_files:
        assert checkpoint.side_documents[side.digest] == (tmp_path / side.path).read_bytes()


def test_a_folder_with_neither_naming_scheme(tmp_path: Path) -> None:
    put(tmp_path, crafted([("b", "U8", [1], b"x")]), "part10.safetensors")
    put(tmp_path, crafted([("a", "U8", [1], b"x")]), "part9.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert [file.path for file in checkpoint.files] == ["part9.safetensors", "part10.safetensors"]


def test_a_diffusers_component(tmp_path: Path) -> None:
    put(tmp_path, crafted([("a", "F32", [1], b"four")]), "diffusion_pytorch_model.safetensors")
    put(tmp_path, crafted([("a", "F16", [1], b"2B")]), "diffusion_pytorch_model.fp16.safetensors")
    assert [s.dtype for s in open_checkpoint(tmp_path).specs] == ["F32"]


def test_an_index_of_another_name(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "x.safetensors.index.json")
    put(tmp_path, crafted([("stray", "U8", [1], b"x")]), "stray.safetensors")
    assert "stray" not in names_of(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    sharded(tmp_path)
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"lm_head__weight": "model-00001-of-00001.safetensors"},
        {"lm_head__weight": "../model.safetensors"},
        {"lm_head__weight": "/model.safetensors"},
        {"lm_head__weight": "pytorch_model.bin"},
    ],
)
def test_an_index_that_disagrees(changes: dict[str, str | None], tmp_path: Path) -> None:
    sharded(tmp_path)
    edit_index(tmp_path, **changes)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    """Copies of several spans and of no bytes, in other places and between other tensors."""
    big, small = bytes(range(256)) * 20_000, ("b", "U8", [3], b"abc")
    tensors = [("a", "U8", [len(big)], big), small, ("none", "U8", [0], b"")]
    put(tmp_path, crafted(tensors), "one.safetensors")
    others = [("c", "U8", [5], b"12345"), tensors[0], ("d", "U8", [2], b"zz"), *tensors[1:]]
    put(tmp_path, crafted(others, pad=3), "two.safetensors")
    checkpoint, layout, arena, _ = loaded(tmp_path)
    assert content(arena, layout) == {name: data for name, _, _, data in others}
    (odd,) = checkpoint.oddities
    assert odd.path == "two.safetensors"
    assert odd.what.endswith("with the same bytes: 'a' and 2 more")
    put(tmp_path, crafted([("b", "U8", [3], b"abd")]), "two.safetensors")
    with pytest.raises(ConfigError, match="one.safetensors and in two.safetensors with other byte"):
        open_checkpoint(tmp_path)


def test_several_indices(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ConfigError, match="has several indices: one.* two"):
        open_checkpoint(tmp_path)


def test_what_is_not_there_or_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="empty"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(ConfigError, match="pickled"):
        open_checkpoint(tmp_path)
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path / "pytorch_model.bin")


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(ConfigError, match="ordinary"):
            open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match="ordinary"):
        open_checkpoint(tmp_path)


# -- ties -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_ties_that_save_model_wrote(tmp_path: Path) -> None:
    save_model(Tied(), str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    (alias,) = checkpoint.aliases
    assert {alias.name, alias.target} == {"first.weight", "second.weight"}
    assert (alias.dtype, alias.shape, alias.stride) == ("F32", (3, 3), (3, 1))


def test_metadata_that_only_looks_like_a_tie(tmp_path: Path) -> None:
    metadata = {"format": "pt", "note": "nobody", "b": "pt"}
    put(tmp_path, crafted([("pt", "U8", [1], b"x"), ("b", "U8", [1], b"x")], metadata))
    assert open_checkpoint(tmp_path).aliases == ()


def test_ties_with_bad_names(tmp_path: Path) -> None:
    put(tmp_path, crafted([("a", "U8", [1], b"x")], {"../b": "a"}))
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    for name in ("one", "two"):
        put(tmp_path, crafted([(name, "U8", [1], b"x")], {"tied": name}), f"{name}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="two files"):
        open_checkpoint(tmp_path)


# -- side files -----------------------------------------------------------------------------------


def test_only_what_cannot_run_travels(tmp_path: Path) -> None:
    put(tmp_path, crafted([("a", "U8", [1], b"x")]))
    kept = {
        "config.json": b"{}",
        "README.md": b"# hello",
        "merges.txt": "é".encode(),
        "tokenizer.model": b"\x0a\x0e\x0a\x05<unk>",
        "spiece.model": b"\x0a\x0e",
        "chat_template.jinja": b"{{ x }}",
        "1_Pooling/config.json": b"{}",
        "latin1.txt": b"\xe9",
        "bpe.codes": b"e s 12\n",
        "prophetnet.tokenizer": b"[PAD]\n",
        "tokenizer.model.v3": b"\x0a\x0e",
        "LICENSE": b"do as you like",
        "model.sig": b"{}",
    }
    refused = {
        "modeling.py": b"print()",
        "pytorch_model.bin": b"\x80\x02",
        "weights.pt": b"PK\x03\x04",
        "word2vec.model": b"\x80\x02",
        "tokenizer_pickled.model": b"\x80\x04",
        "script.txt": b"#!/bin/sh\n",
        "binary.txt": b"\xe9\0",
        "latin1.json": b"\xe9",
        "pytorch_model.bin.index.json": b"{}",
        "other.safetensors.fp16.index.json": b'{"weight_map": {"a": "b.safetensors"}}',
        "key.txt": b"-----BEGIN OPENSSH PRIVATE KEY-----\n",
        "net.onnx": b"x",
        "page.html": b"x",
        "deep/a/b/c/config.json": b"{}",
        ".hidden.json": b"{}",
        ".git/config.json": b"{}",
        "README": b"no suffix",
    }
    for name, data in (kept | refused).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "big.json").touch()
    os.truncate(tmp_path / "big.json", (64 << 20) + 1)
    checkpoint = open_checkpoint(tmp_path)
    assert {side.path for side in checkpoint.packaging.side_files} == kept.keys()
    folders = {"deep/a/b/c/config.json": "deep/a/b/c/", ".git/config.json": ".git/"}
    named = {folders.get(path, path) for path in (*refused, "big.json")}
    assert checkpoint.left_out.keys() == named


def test_links_are_followed_inside_the_folder_only(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    put(folder, crafted([("a", "U8", [1], b"x")]))
    (tmp_path / "secret.json").write_text('{"key": 1}')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x.json").write_text("{}")
    (folder / "config.json").symlink_to("../secret.json")
    (folder / "more").symlink_to("../elsewhere")
    (folder / "real.json").write_text("{}")
    (folder / "inner.json").symlink_to("real.json")
    (folder / "broken.json").symlink_to("nowhere")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("token")
    (folder / "id_rsa").write_text("not even PEM")
    (folder / "hidden.json").symlink_to(".git/config")
    (folder / "key.json").symlink_to("id_rsa")
    named = {
        "config.json": "is a link that leaves the folder",
        "more": "is a link to a folder",
        "broken.json": "is a link to nothing",
        ".git/": "is hidden",
        "hidden.json": "is a link to a file that is hidden",
        "id_rsa": "is not JSON, text or a tokenizer",
        "key.json": "is a link to a file that is not JSON, text or a tokenizer",
    }
    checkpoint = open_checkpoint(folder)
    assert {s.path for s in checkpoint.packaging.side_files} == {"real.json", "inner.json"}
    assert checkpoint.left_out == named


def test_a_folder_that_becomes_a_link_is_not_followed(tmp_path: Path) -> None:
    folder, home = tmp_path / "m", tmp_path / "home"
    for each in (folder / "sub", home):
        each.mkdir(parents=True)
        (each / "config.json").write_text("{}")
    ((_, location),) = walk(folder, (), (), {})
    assert read_side_file(location) == b"{}"
    (folder / "sub").rename(tmp_path / "was")
    (folder / "sub").symlink_to(home)
    with pytest.raises(CheckpointError, match="is not there"):
        read_side_file(location)


def test_links_are_followed_below_folders_that_the_user_names(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "store"
    folder.mkdir()
    (store / "ab").mkdir(parents=True)
    (store / ".ssh").mkdir()
    put(folder, crafted([("a", "U8", [1], b"x")]))
    targets = {
        "config.json": "ab/0123456789abcdef0123456789abcd",  # as DVC calls it
        "generation_config.json": "shared.json",
        "vocab.txt": ".ssh/id.txt",
        "merges.txt": "id_rsa",
        "notes.txt": "key.txt",
    }
    for path, target in targets.items():
        (store / target).write_text("{}")
        (folder / path).symlink_to(store / target)
    (store / "key.txt").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    assert not open_checkpoint(folder).packaging.side_files
    checkpoint = open_checkpoint(folder, resolved_folders([store]))
    assert {s.path for s in checkpoint.packaging.side_files} == {
        "config.json",
        "generation_config.json",
    }
    assert checkpoint.left_out.keys() == {"vocab.txt", "merges.txt", "notes.txt"}
    with pytest.raises(ConfigError, match="is not a folder"):
        resolved_folders([store / "nowhere"])


def test_a_folder_of_links_into_one_repository(tmp_path: Path) -> None:
    blobs, folder = tmp_path / "models--a--b" / "blobs", tmp_path / "model"
    blobs.mkdir(parents=True)
    folder.mkdir()
    (blobs / "aaa").write_bytes(crafted([("a", "U8", [1], b"x")]))
    (blobs / "bbb").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (folder / "model.safetensors").symlink_to(blobs / "aaa")
    (folder / "config.json").symlink_to(blobs / "bbb")
    (folder / "other.json").symlink_to(tmp_path / "secret.json")
    checkpoint = open_checkpoint(folder)
    assert [side.path for side in checkpoint.packaging.side_files] == ["config.json"]
    assert checkpoint.left_out.keys() == {"other.json"}


def test_what_only_this_release_lets_travel_is_listed_apart(tmp_path: Path) -> None:
    put(tmp_path, crafted([("a", "U8", [1], b"x")]))
    (tmp_path / "LICENSE").write_text("do as you like")
    (tmp_path / "vocab.txt").write_bytes(b"\xe9")
    (tmp_path / "zz.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs, checkpoint.aliases)
    manifest = encode(layout, checkpoint.packaging, {"a": root_of(b"x")})
    document = json.loads(manifest.documents[manifest.ref.packaging])
    assert [each[0] for each in document["side_files"]] == ["zz.json"]
    assert [each[0] for each in document["more_side_files"]] == ["LICENSE", "vocab.txt"]
    assert decode(manifest.ref, manifest.documents).packaging == checkpoint.packaging


def test_hugging_face_cache(tmp_path: Path) -> None:
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (tmp_path / "secret.json").write_text("{}")
    (blobs / "aaa").write_bytes(crafted([("a", "U8", [1], b"x")]))
    (blobs / "bbb").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/aaa")
    (snapshot / "config.json").symlink_to("../../blobs/bbb")
    (snapshot / "other.json").symlink_to("../../../secret.json")
    checkpoint = open_checkpoint(snapshot)
    assert names_of(snapshot) == {"a"}
    assert [side.path for side in checkpoint.packaging.side_files] == ["config.json"]
    assert [file.path for file in checkpoint.files] == ["model.safetensors"]


@pytest.mark.parametrize(
    "path", ["a.json", "x/tokenizer.model", "source.spm", "vocab.bpe", "é.txt"]
)
def test_names_that_may_travel(path: str) -> None:
    assert bad_side_path(path) is None


@pytest.mark.parametrize(
    "path",
    ["", "a", "a.py", "a.bin", "a.pt", "a.so", "../a.json", "/a.json", "a//b.json", "a/./b.json",
     ".a.json", ".x/a.json", "a\\b.json", "a:b.json", "a\n.json", "a\0.json", "\ud800.json",
     "x" * 300 + ".json", "d/" * 300 + "a.json", "a.json/", "a.model"],
)  # fmt: skip
def test_names_that_may_not(path: str) -> None:
    assert bad_side_path(path) is not None


def test_contents_that_may_not() -> None:
    assert bad_side_content("a.json", b"{}") is None
    assert bad_side_content("tokenizer.model", b"\x0a\xff") is None
    assert bad_side_content("tokenizer.model", b"\x80\x04x") is not None
    assert bad_side_content("a.json", b"\xff\xfe") is not None
