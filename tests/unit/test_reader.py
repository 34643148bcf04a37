"""Filling arenas: every byte in its place, every digest right, and what luck can do to a file."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from mx import buffers
from mx.core.digest import chunk_digest
from mx.core.layout import TensorSpec
from mx.core.manifest import plan_layout
from mx.core.types import BLOCK_BYTES, DTYPE_BITS, ChunkGrid, Layout
from mx.errors import CheckpointError, ClosedError, LocalError
from mx.storage import spans
from mx.storage.landing import Landing
from mx.storage.reader import SPAN_BYTES, Filled, fill, fill_from_tensors
from mx.storage.safetensors import open_checkpoint
from mx.storage.spans import SpanReader
from tests.support.checkpoints import content, crafted, loaded, make_arena, tiny

PATTERN = np.random.default_rng(0).integers(0, 256, 12 << 20, dtype=np.uint8).tobytes()


def check(layout: Layout, arena: memoryview, filled: Filled, chunk_nbytes: int) -> None:
    """Digests as defined, computed from the arena once more; padding untouched."""
    for name, data in content(arena, layout).items():
        assert filled.tensor_digests[name] == blake3(data).digest()
    grid = ChunkGrid(layout, chunk_nbytes)
    assert len(filled.chunk_digests) == 16 * len(grid)
    end = 0
    for chunk in grid:
        segments = grid.segments(chunk)
        views = [arena[s.arena_offset : s.arena_offset + s.nbytes] for s in segments]
        expected = filled.chunk_digests[16 * chunk.index : 16 * chunk.index + 16]
        assert chunk_digest(segments, views) == expected
        for segment in segments:
            gap = arena[end : segment.arena_offset]
            assert bytes(gap) == b"\xa5" * len(gap)
            end = segment.arena_offset + segment.nbytes


def write_mixed(folder: Path, *, pad: int = 0) -> dict[str, bytes]:
    """Two files with tensors of many sizes, larger than a span some, in no helpful order."""
    sizes = [0, 1, 5, 255, 256, 4096, 100_000, BLOCK_BYTES, SPAN_BYTES + 4099, 2 * SPAN_BYTES, 3]
    random.Random(1).shuffle(sizes)
    tensors = {}
    for i, size in enumerate(sizes):
        tensors[f"model.layers.{i % 3}.mlp.w{i}"] = PATTERN[i * 7 : i * 7 + size]
    rows = [(name, "U8", [len(data)], data) for name, data in tensors.items()]
    (folder / "one.safetensors").write_bytes(crafted(rows[:5], pad=pad))
    (folder / "two.safetensors").write_bytes(crafted(rows[5:], {"format": "pt"}, pad=pad + 3))
    return tensors


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pad", [0, 1])
def test_every_byte_arrives(pad: int, threads: int, tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path, pad=pad)
    _, layout, arena, filled = loaded(tmp_path, threads=threads)
    assert content(arena, layout) == tensors
    check(layout, arena, filled, BLOCK_BYTES)


def test_chunks_of_several_blocks(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    arena = make_arena(layout)
    filled = fill(checkpoint, layout, arena, chunk_nbytes=3 * BLOCK_BYTES)
    check(layout, arena, filled, 3 * BLOCK_BYTES)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek", "gpt2", "t5", "gemma", "vit"])
def test_real_architectures(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path, max_shard_size="60KB")
    checkpoint, layout, arena, filled = loaded(tmp_path)
    check(layout, arena, filled, BLOCK_BYTES)
    found = content(arena, layout)
    for file in checkpoint.files:
        with safe_open(file.location, "np") as reader:
            for name in reader.keys():  # noqa: SIM118
                assert reader.get_tensor(name).tobytes() == found.pop(name)
    assert not found


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype(dtype: str, tmp_path: Path) -> None:
    data = PATTERN[: 3 * DTYPE_BITS[dtype]]
    rows = [("a", dtype, [8, 3], data), ("none", dtype, [0], b""), ("b", dtype, [3, 8], data)]
    (tmp_path / "model.safetensors").write_bytes(crafted(rows))
    _, layout, arena, filled = loaded(tmp_path)
    assert content(arena, layout) == {name: data for name, _, _, data in rows}
    check(layout, arena, filled, BLOCK_BYTES)


def test_nothing_but_empty_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(crafted([("a", "F32", [0], b"")]))
    _, layout, _, filled = loaded(tmp_path)
    assert (layout.arena_nbytes, filled.chunk_digests) == (0, b"")
    assert filled.tensor_digests == {"a": blake3().digest()}


def test_where_alignments_agree_bytes_are_read_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mlp.w"
    bare = crafted([(name, "U8", [2 * SPAN_BYTES], b"")])
    data = crafted(
        [(name, "U8", [2 * SPAN_BYTES], PATTERN[: 2 * SPAN_BYTES])], pad=-len(bare) % 4096
    )
    (tmp_path / "model.safetensors").write_bytes(data)
    copied: list[int] = []
    copy = buffers.copy_bytes

    def counted(here: memoryview, there: memoryview) -> None:
        copied.append(len(here))
        copy(here, there)

    monkeypatch.setattr(spans, "copy_bytes", counted)
    _, layout, arena, filled = loaded(tmp_path)
    check(layout, arena, filled, BLOCK_BYTES)
    # Only what shares its 4 MiB of file with the header's end goes through a buffer, if that.
    assert copied == []


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_file_systems_without_o_direct(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = write_mixed(tmp_path, pad=1)
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def fake_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        fd = real_open(path, flags, *args, **kwargs)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def fake_preadv(fd: int, buffers: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "another alignment, please")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "preadv", fake_preadv)
    _, layout, arena, filled = loaded(tmp_path)
    assert content(arena, layout) == tensors
    check(layout, arena, filled, BLOCK_BYTES)


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_mixed(tmp_path, pad=1)
    real = os.preadv

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        first = buffers[0]
        return real(fd, [first[: max(4096, len(first) // 2)]], offset)

    for direct in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", short)
            if not direct:
                patch.setattr(spans, "_open_direct", lambda file: -1)
            _, layout, arena, filled = loaded(tmp_path)
        assert content(arena, layout) == tensors
        check(layout, arena, filled, BLOCK_BYTES)


def test_progress_ends_at_the_total_and_never_falls(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    seen: list[int] = []
    fill(checkpoint, layout, make_arena(layout), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == layout.payload_nbytes


# -- bad luck -------------------------------------------------------------------------------------


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    os.truncate(tmp_path / "two.safetensors", 5 << 20)
    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        fill(checkpoint, layout, make_arena(layout))


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_while_it_is_read(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    if not direct:
        monkeypatch.setattr(spans, "_open_direct", lambda file: -1)

    def cut(done: int) -> None:
        os.truncate(tmp_path / "two.safetensors", 4096 + 100)

    with pytest.raises(CheckpointError, match=r"two\.safetensors"):
        fill(checkpoint, layout, make_arena(layout), progress=cut)


def test_a_file_that_is_replaced_or_written_to(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    path = tmp_path / "one.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)

    def touch(done: int) -> None:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")

    with pytest.raises(CheckpointError, match="changed"):
        fill(checkpoint, layout, make_arena(layout), progress=touch)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match="not there"):
        fill(checkpoint, layout, make_arena(layout))
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed"):
        fill(checkpoint, layout, make_arena(layout))


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    real = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset >= SPAN_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(LocalError, match="Input/output error"):
        fill(checkpoint, layout, make_arena(layout))


@pytest.mark.parametrize("after", [0, 3])
def test_cancelling_leaves_no_thread_and_no_hold_on_the_arena(after: int, tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    mapping = mmap.mmap(-1, layout.arena_nbytes)
    view = memoryview(mapping)
    calls = iter(range(1000))
    with pytest.raises(ClosedError) as caught:
        fill(checkpoint, layout, view, cancelled=lambda: next(calls) >= after)
    assert not [t for t in threading.enumerate() if t.name.startswith("mx-read")]
    view.release()
    mapping.close()  # BufferError if anything, the error's traceback included, still held it
    assert caught.value.exit_code == 1


def test_an_error_lets_go_of_the_arena(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    os.truncate(tmp_path / "two.safetensors", 5 << 20)
    mapping = mmap.mmap(-1, layout.arena_nbytes)
    view = memoryview(mapping)
    with pytest.raises(CheckpointError):
        fill(checkpoint, layout, view)
    view.release()
    mapping.close()


def test_an_arena_or_layout_that_does_not_fit(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    with pytest.raises(ValueError, match="arena"):
        fill(checkpoint, layout, make_arena(layout)[:-1])
    name = checkpoint.specs[0].name
    other = plan_layout([TensorSpec(s.name, "I8", s.shape) for s in checkpoint.specs])
    with pytest.raises(ValueError, match=name):
        SpanReader(
            checkpoint.files[0],
            other,
            {tensor.name: i for i, tensor in enumerate(other.tensors)},
            make_arena(other),
        )


# -- from memory ----------------------------------------------------------------------------------


def test_memory_gives_the_digests_that_files_give(tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path)
    _, layout, arena, filled = loaded(tmp_path)
    views = {name: memoryview(data) for name, data in tensors.items()}
    again = make_arena(layout)
    assert fill_from_tensors(views, layout, again, chunk_nbytes=BLOCK_BYTES) == filled
    assert again == arena


def test_memory_that_does_not_fit() -> None:
    layout = plan_layout([TensorSpec("a", "U8", (4,))])
    arena = make_arena(layout)
    for tensors in ({}, {"a": memoryview(b"abc")}):
        with pytest.raises(ValueError, match="'a'"):
            fill_from_tensors(tensors, layout, arena)
    with pytest.raises(ClosedError):
        fill_from_tensors({"a": memoryview(b"abcd")}, layout, arena, cancelled=lambda: True)


@settings(suppress_health_check=[HealthCheck.data_too_large])
@given(
    st.lists(
        st.sampled_from([0, 1, 300, BLOCK_BYTES + 9, 2 * BLOCK_BYTES]), min_size=1, max_size=5
    ),
    st.randoms(use_true_random=False),
)
def test_pieces_may_land_in_any_order(sizes: list[int], rng: random.Random) -> None:
    layout = plan_layout([TensorSpec(f"w{i}", "U8", (n,)) for i, n in enumerate(sizes)])
    arena = make_arena(layout)
    pieces: list[tuple[int, int, int]] = []
    for index, tensor in enumerate(layout.tensors):
        start = layout.layers[tensor.layer].arena_offset + tensor.offset
        arena[start : start + tensor.nbytes] = PATTERN[index : index + tensor.nbytes]
        offset = 0
        while offset < tensor.nbytes:
            nbytes = rng.randint(1, tensor.nbytes - offset)
            pieces.append((index, offset, nbytes))
            offset += nbytes
    landing = Landing(layout, arena, BLOCK_BYTES)
    rng.shuffle(pieces)
    for done, piece in enumerate(pieces):
        if done == len(pieces) - 1:
            with pytest.raises(ValueError, match="landed"):
                landing.chunk_digests()
        landing.landed(*piece)
    names = [tensor.name for tensor in layout.tensors]
    filled = Filled(dict(zip(names, landing.tensor_digests, strict=True)), landing.chunk_digests())
    check(layout, arena, filled, BLOCK_BYTES)
