"""What is not a checkpoint is named for what it is, with what to name instead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mx.errors import CheckpointError, ConfigError, MxError
from mx.storage.safetensors import open_checkpoint

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    "size 12345\n"
)


def tensors(folder: Path, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.zeros(4)}, folder / name)
    return folder


def refused(path: Path, kind: type[MxError] = ConfigError) -> MxError:
    """Return the error for a path that is not a checkpoint: the user's, not the bytes'."""
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    return caught.value


def assert_followed(error: MxError, *paths: Path) -> None:
    """The hint names these, and each can be opened."""
    for path in paths:
        assert str(path) in error.hint
        open_checkpoint(path)


def test_a_diffusers_pipeline(tmp_path: Path) -> None:
    root = tmp_path / "sd"
    parts = [
        tensors(root / name, "diffusion_pytorch_model.safetensors") for name in ("unet", "vae")
    ]
    parts.append(tensors(root / "text_encoder"))
    (root / "scheduler").mkdir()
    (root / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    error = refused(root)
    assert "diffusers pipeline" in error.message
    assert_followed(error, *parts)
    assert "scheduler" not in error.hint


def test_a_diffusers_pipeline_without_weights(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "unet").mkdir()
    assert "without weights" in refused(tmp_path).message


def test_a_folder_of_checkpoints(tmp_path: Path) -> None:
    parts = [tensors(tmp_path / f"m{i}") for i in range(3)]
    assert_followed(refused(tmp_path), *parts)
    for i in range(3, 12):
        tensors(tmp_path / f"m{i}")
    assert refused(tmp_path).hint.endswith("or one of 6 more")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "index"])
def test_a_git_lfs_pointer(name: str, tmp_path: Path) -> None:
    if name == "index":
        name = "model.safetensors.index.json"
    else:
        tensors(tmp_path)
    (tmp_path / name).write_text(POINTER)
    error = refused(tmp_path, CheckpointError)
    assert str(tmp_path / name) in error.message and "git-LFS pointer" in error.message
    assert "git lfs pull" in error.hint
    if name == "model.safetensors":
        assert refused(tmp_path / name, CheckpointError).message == error.message


def test_gguf(tmp_path: Path) -> None:
    (tmp_path / "llama.Q4_K_M.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "README.md").write_text("hello")
    for path in (tmp_path, tmp_path / "llama.Q4_K_M.gguf"):
        error = refused(path)
        assert "llama.Q4_K_M.gguf is a GGUF file" in error.message
        assert ".safetensors files that it was made from" in error.hint
    (tmp_path / "odd.bin").write_bytes(b"GGUF" + bytes(100))
    assert "GGUF" in refused(tmp_path / "odd.bin").message


@pytest.mark.parametrize(
    ("names", "convert"),
    [
        (["config.json", "pytorch_model.bin"], "from_pretrained({folder!r}).save_pretrained"),
        (
            ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
            "from_pretrained({folder!r}).save_pretrained",
        ),
        (["model.pt"], "safetensors.torch.save_file(torch.load("),
    ],
)
def test_pickled_weights(names: list[str], convert: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    if "config.json" in names:
        (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        convert = "transformers.LlamaForCausalLM." + convert
    error = refused(tmp_path)
    assert "pickled weights, which mx never reads" in error.message
    assert convert.format(folder=str(tmp_path)) in error.hint
    weights = next(name for name in names if name.endswith((".bin", ".pt")))
    assert "pickled" in refused(tmp_path / weights).message


def cached(hub: Path, *snapshots: str, main: str = "") -> Path:
    root = hub / "models--org--name"
    for name in snapshots:
        tensors(root / "snapshots" / name)
    (root / "snapshots").mkdir(parents=True, exist_ok=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    if main:
        (root / "refs" / "main").write_text(main)
    return root


def test_the_cache_with_one_snapshot(tmp_path: Path) -> None:
    root = cached(tmp_path, "a1b2", main="a1b2")
    for path in (root, root / "snapshots"):
        error = refused(path)
        assert error.hint == f"name {root}/snapshots/a1b2"
        assert_followed(error, root / "snapshots" / "a1b2")
    assert_followed(refused(tmp_path), root / "snapshots" / "a1b2")


def test_the_cache_with_several_snapshots(tmp_path: Path) -> None:
    root = cached(tmp_path, "a1b2", "c3d4", main="c3d4\n")
    error = refused(root)
    assert error.hint == f"name {root}/snapshots/c3d4 (its main), or {root}/snapshots/a1b2"
    (root / "refs" / "main").unlink()
    assert refused(root).hint == f"name {root}/snapshots/a1b2 or {root}/snapshots/c3d4"


def test_the_cache_without_snapshots(tmp_path: Path) -> None:
    assert "download" in refused(cached(tmp_path)).hint


def test_other_paths(tmp_path: Path) -> None:
    assert "is empty" in refused(tmp_path).message
    (tmp_path / "notes.txt").write_text("hello")
    assert "holds no .safetensors file" in refused(tmp_path).message
    assert "convert it" in refused(tmp_path / "notes.txt").hint
    tensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    assert refused(index).hint == f"name its folder: {tmp_path}"
