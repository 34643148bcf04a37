"""Filling arenas: every byte in its place, every digest right."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from benchmarks.roots import root_of
from mx import buffers
from mx.core.digest import block_digest, shortcut_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import plan_layout
from mx.core.pages import check_page
from mx.core.types import DTYPE_BITS, Layout
from mx.errors import ClosedError
from mx.memory.arena import HostArena, MemfdArena
from mx.storage import disk_file, spans
from mx.storage.disk_file import arena_shift
from mx.storage.landing import ArenaDigests, Landing
from mx.storage.load import load_opened
from mx.storage.reader import RING_BYTES, SPAN_BYTES, fill, fill_from_tensors
from mx.storage.safetensors import open_checkpoint
from mx.storage.spans import ArenaWriter, SpanReader
from mx.transport import host_view
from tests.support.checkpoints import PATTERN, content, loaded, make_arena, tiny, write_mixed
from tests.support.crafted import crafted


def check(layout: Layout, arena: memoryview, filled: ArenaDigests) -> None:
    """Digests as defined, computed from the arena once more; padding untouched."""
    assert filled == digests(layout, arena, shortcuts=bool(filled.shortcuts))
    end = 0
    for layer in layout.layers:
        for offset, nbytes in layer.extents:
            begin = layer.arena_offset + offset
            gap = arena[end:begin]
            assert bytes(gap) == b"\xa5" * len(gap)
            end = begin + nbytes


def digests(layout: Layout, arena: memoryview, *, shortcuts: bool) -> ArenaDigests:
    """Return what filling this arena should have returned, computed tensor by tensor."""
    roots = {name: root_of(data) for name, data in content(arena, layout).items()}
    pages = [b"" for _ in layout.layers]
    short = b""
    for tensor, data in zip(layout.tensors, content(arena, layout).values(), strict=True):
        for at in range(0, len(data), BLOCK_BYTES):
            pages[tensor.layer] += block_digest(data[at : at + BLOCK_BYTES])
            short += shortcut_digest(data[at : at + BLOCK_BYTES])
    return ArenaDigests(roots, pages, short if shortcuts else b"")


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("pad", [0, 1])
def test_every_byte_arrives(pad: int, threads: int, tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path, pad=pad)
    _, layout, arena, filled = loaded(tmp_path, threads=threads)
    assert content(arena, layout) == tensors
    check(layout, arena, filled)


@pytest.mark.parametrize("shortcuts", [True, False])
def test_a_memfd_gets_what_memory_gets(shortcuts: bool, tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path, pad=1)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    views = {name: memoryview(data) for name, data in tensors.items()}
    for from_disk in (True, False):
        arena = MemfdArena(layout.arena_nbytes)
        filled = (
            fill(checkpoint, layout, arena.view, memfd=arena.memfd, shortcuts=shortcuts)
            if from_disk
            else fill_from_tensors(
                views, layout, arena.view, memfd=arena.memfd, shortcuts=shortcuts
            )
        )
        arena.seal()
        host = make_arena(layout)
        assert filled == fill(checkpoint, layout, host, shortcuts=shortcuts)
        check(layout, host, filled)
        assert content(arena.view, layout) == tensors
        arena.release()


def test_loaded_checkpoints_hold_their_pages(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    for arena_of in (HostArena, MemfdArena):
        found = load_opened(
            open_checkpoint(tmp_path),
            lambda layout, kind=arena_of: kind(layout.arena_nbytes),  # type: ignore[misc]
            shortcuts=True,
            threads=2,
        )
        layout = found.manifest.layout
        expected = digests(layout, host_view(found.arena.view), shortcuts=True)
        assert found.manifest.roots == tuple(expected.roots[t.name] for t in layout.tensors)
        assert [found.pages.get(layer.index) for layer in layout.layers] == expected.pages
        for layer, page in enumerate(expected.pages):
            check_page(found.manifest, layer, page)
        assert found.shortcuts == expected.shortcuts
        assert found.manifest.grid.chunk_nbytes == BLOCK_BYTES  # the default of so few bytes
        found.arena.release()


def test_a_span_is_as_many_whole_blocks_as_fit(tmp_path: Path) -> None:
    write_mixed(tmp_path, pad=1)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    index_of = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
    for file in checkpoint.files:
        ends = {t.begin for t in file.tensors} | {
            min(t.begin + at, t.end)
            for t in file.tensors
            for at in range(BLOCK_BYTES, t.end - t.begin + BLOCK_BYTES, BLOCK_BYTES)
        }
        reader = SpanReader(file, layout, index_of, ArenaWriter(make_arena(layout)))
        for span_nbytes in (BLOCK_BYTES, SPAN_BYTES - 1, SPAN_BYTES, RING_BYTES):
            found = list(reader.spans(span_nbytes))
            starts = [start for start, _ in found]
            assert starts == [file.tensors[0].begin, *(end for _, end in found[:-1])]
            assert found[-1][1] == file.tensors[-1].end
            for start, end in found:
                assert {start, end} <= ends
                assert 0 < end - start <= span_nbytes
            for start, end in found[:-1]:
                assert min(each for each in ends if each > end) - start > span_nbytes
        with pytest.raises(ValueError, match="block"):
            next(reader.spans(BLOCK_BYTES - 1))
        layer_of = {tensor.name: tensor.layer for tensor in layout.tensors}
        layer_at = {
            at: layer_of[t.spec.name]
            for t in file.tensors
            for at in (t.begin, t.end - 1)
            if t.end > t.begin
        }
        for least in (1, BLOCK_BYTES):
            cut = list(reader.spans(SPAN_BYTES, least))
            assert [start for start, _ in cut] == [file.tensors[0].begin, *(e for _, e in cut[:-1])]
            assert cut[-1][1] == file.tensors[-1].end
            assert {each for span in cut for each in span} <= ends
            for start, end in cut:  # only what is shorter goes beyond a layer's end
                inside = [t for t in file.tensors if start < t.begin < end and t.end > t.begin]
                turns = [t.begin for t in inside if layer_at[t.begin] != layer_at[t.begin - 1]]
                assert all(turn - start < least for turn in turns)
        reader.close()


def test_more_threads_than_the_ring_has_blocks(tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path)
    _, layout, arena, filled = loaded(tmp_path, threads=RING_BYTES // BLOCK_BYTES + 3)
    assert content(arena, layout) == tensors
    check(layout, arena, filled)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "deepseek", "gpt2", "t5", "gemma", "vit"])
def test_real_architectures(kind: str, tmp_path: Path) -> None:
    tiny(kind).save_pretrained(tmp_path, max_shard_size="60KB")
    checkpoint, layout, arena, filled = loaded(tmp_path)
    check(layout, arena, filled)
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
    check(layout, arena, filled)


def test_nothing_but_empty_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(crafted([("a", "F32", [0], b"")]))
    _, layout, _, filled = loaded(tmp_path)
    assert layout.arena_nbytes == 0
    assert filled == ArenaDigests({"a": root_of(b"")}, [b""], b"")


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
    check(layout, arena, filled)
    assert copied == []


@pytest.mark.parametrize("pad", [0, 8, 120, 4088])
def test_an_arena_begins_where_most_bytes_are_read_into_place(
    pad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is copied are pages at the ends of tensors, and short tensors."""
    sizes = [3 * BLOCK_BYTES, 4096, 5 * BLOCK_BYTES + 4096, 512, BLOCK_BYTES, SPAN_BYTES]
    rows = [
        (f"model.layers.{i % 2}.mlp.w{i}", "U8", [size], PATTERN[i * 9 : i * 9 + size])
        for i, size in enumerate(sizes)
    ]
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted(rows, pad=-int.from_bytes(crafted(rows)[:8], "little") % 8 + pad))
    checkpoint = open_checkpoint(path)
    layout = plan_layout(checkpoint.specs)
    shift = arena_shift(checkpoint.files, layout)
    assert shift % 8 == 0
    written: list[int] = []
    real = ArenaWriter.write

    def counted(self: ArenaWriter, place: int, data: memoryview) -> None:
        written.append(len(data))
        real(self, place, data)

    monkeypatch.setattr(ArenaWriter, "write", counted)
    arena = HostArena(layout.arena_nbytes, shift)
    filled = fill(checkpoint, layout, arena.view)
    assert content(arena.view, layout) == {name: data for name, _, _, data in rows}
    assert filled == digests(layout, arena.view, shortcuts=False)
    assert sum(written) < sum(sizes) // 10


@given(
    st.lists(
        st.sampled_from([1, 300, 4096, 65536, 70_000, BLOCK_BYTES + 9]), min_size=1, max_size=8
    ),
    st.integers(0, 4096),
    st.integers(0, 4096),
)
@settings(max_examples=40, deadline=None)
def test_any_alignment_of_file_and_arena(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], pad: int, shift: int
) -> None:
    rows = [
        (f"model.layers.{i % 3}.mlp.w{i}", "U8", [size], PATTERN[i * 9 : i * 9 + size])
        for i, size in enumerate(sizes)
    ]
    path = tmp_path_factory.mktemp("any") / "model.safetensors"
    path.write_bytes(crafted(rows, pad=pad))
    checkpoint = open_checkpoint(path)
    layout = plan_layout(checkpoint.specs)
    arena = HostArena(layout.arena_nbytes, shift)
    filled = fill(checkpoint, layout, arena.view, in_layer_order=shift % 2 == 0)
    assert content(arena.view, layout) == {name: data for name, _, _, data in rows}
    assert filled == digests(layout, arena.view, shortcuts=False)


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
    check(layout, arena, filled)


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
                patch.setattr(disk_file, "_open_direct", lambda file: -1)
            _, layout, arena, filled = loaded(tmp_path)
        assert content(arena, layout) == tensors
        check(layout, arena, filled)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = write_mixed(tmp_path, pad=1)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    arena = MemfdArena(layout.arena_nbytes)
    real = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        return real(fd, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", short)
    fill(checkpoint, layout, arena.view, memfd=arena.memfd)
    assert content(arena.view, layout) == tensors
    arena.release()


def test_progress_ends_at_the_total_and_never_falls(tmp_path: Path) -> None:
    write_mixed(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    seen: list[int] = []
    fill(checkpoint, layout, make_arena(layout), progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == layout.payload_nbytes


# -- from memory ----------------------------------------------------------------------------------


def test_memory_gives_the_digests_that_files_give(tmp_path: Path) -> None:
    tensors = write_mixed(tmp_path)
    _, layout, arena, filled = loaded(tmp_path)
    views = {name: memoryview(data) for name, data in tensors.items()}
    again = make_arena(layout)
    assert fill_from_tensors(views, layout, again) == filled
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
        st.sampled_from([0, 1, 300, BLOCK_BYTES, BLOCK_BYTES + 9, 2 * BLOCK_BYTES]),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_blocks_may_land_in_any_order(
    sizes: list[int], shortcuts: bool, rng: random.Random
) -> None:
    specs = [TensorSpec(f"model.layers.{i // 2}.mlp.w{i}", "U8", (n,)) for i, n in enumerate(sizes)]
    layout = plan_layout(specs)
    arena = make_arena(layout)
    blocks: list[tuple[int, int, memoryview]] = []
    for index, tensor in enumerate(layout.tensors):
        start = layout.layers[tensor.layer].arena_offset + tensor.offset
        arena[start : start + tensor.nbytes] = PATTERN[index : index + tensor.nbytes]
        for at in range(0, tensor.nbytes, BLOCK_BYTES):
            end = min(at + BLOCK_BYTES, tensor.nbytes)
            blocks.append((index, at // BLOCK_BYTES, arena[start + at : start + end]))
    left = Counter(layout.tensors[index].layer for index, _, _ in blocks)
    complete: list[int] = []
    landing = Landing(layout, shortcuts=shortcuts, on_layer=complete.append)
    rng.shuffle(blocks)
    expected = []
    for index, block, view in blocks:
        with pytest.raises(ValueError, match="landed"):
            landing.roots()
        landing.landed(index, block, view)
        layer = layout.tensors[index].layer
        left[layer] -= 1
        expected += [layer] if not left[layer] else []
        assert complete == expected
    check(layout, arena, ArenaDigests(landing.roots(), landing.pages(), landing.shortcuts()))


def test_a_layer_is_reported_when_all_of_it_is_in_place(tmp_path: Path) -> None:
    """Each layer once; its bytes may be taken out of the destination then."""
    tensors = write_mixed(tmp_path, pad=1)
    checkpoint = open_checkpoint(tmp_path)
    layout = plan_layout(checkpoint.specs)
    views = {name: memoryview(data) for name, data in tensors.items()}
    whole = make_arena(layout)
    expected = fill(checkpoint, layout, whole)
    for from_disk in (True, False):
        arena, seen = make_arena(layout), list[int]()

        def taken(index: int, arena: memoryview = arena, seen: list[int] = seen) -> None:
            layer = layout.layers[index]
            there = slice(layer.arena_offset, layer.arena_offset + layer.nbytes)
            assert arena[there] == whole[there]
            arena[there] = bytes(layer.nbytes)
            seen.append(index)

        filled = (
            fill(checkpoint, layout, arena, on_layer=taken)
            if from_disk
            else fill_from_tensors(views, layout, arena, on_layer=taken)
        )
        assert filled == expected
        assert sorted(seen) == [layer.index for layer in layout.layers if layer.nbytes]


def test_tensors_that_change_while_they_are_copied() -> None:
    """The digests are those of the copy, whatever became of the original."""
    data = bytearray(PATTERN[: 2 * SPAN_BYTES])
    layout = plan_layout([TensorSpec("a", "U8", (len(data),))])
    arena = MemfdArena(layout.arena_nbytes)
    real = os.pwrite

    def changing(fd: int, block: memoryview, offset: int) -> int:
        written = real(fd, block, offset)
        data[offset] ^= 0xFF
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", changing)
        filled = fill_from_tensors({"a": memoryview(data)}, layout, arena.view, memfd=arena.memfd)
    assert filled == digests(layout, arena.view, shortcuts=False)
    assert filled.roots["a"] != root_of(bytes(data))
    arena.release()
