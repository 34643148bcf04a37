"""KV blocks in files: bit-equal after their maker's end, bounded, and never a wrong byte, whatever
is killed, full, changed or of another."""

from __future__ import annotations

import os
import random
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy

from mx.errors import CheckpointError, ConfigError
from mx.kv import KvFiles, files, freeze_blocks, segments
from mx.kv import reader as kv_reader
from tests.support.kv_blocks import (
    FORM,
    HEADS,
    NAME,
    SLOTS,
    KvChild,
    Listing,
    Taking,
    key_file,
    kv_child,
    names,
    other_form,
    tensors,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ALL = 20
BLOCK = 4 * 2 * HEADS * 8 * 16 * 4  # bytes


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def child(commands_are_forked: None) -> Iterator[KvChild]:
    with kv_child() as process:
        yield process


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reader, "LOOK_S", 0.05)


def segments_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


def kept(key: Path, folder: Path, **more: object) -> list[int]:
    """Write a pool's blocks; return their slots."""
    with Listing(key, **more) as own:  # type: ignore[arg-type]
        files = own.keep(folder)
        files.close()
        assert files.written == len(own.names)
        return own.slots


def test_blocks_outlive_their_maker(child: KvChild, key: Path, folder: Path) -> None:
    slots = child.ask(f"(own := Listing({str(key)!r})).slots")
    child.ask(f"(files := own.keep({str(folder)!r})) and None")
    child.ask("files.close()")
    child.send_signal(signal.SIGKILL)
    child.wait()
    with Taking(key, files=[folder]) as own:
        assert own.reader.found(own.names) == ALL  # at once: folders are looked at first
        assert own.fetch(ALL) == []
        assert own.has(tensors(1), slots)
        assert own.wrong == 0
    (path,) = segments_of(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    found = safetensors.numpy.load_file(path)
    assert found["blocks"].shape == (ALL, BLOCK)
    assert found["names"].tobytes() == b"".join(own.names[:ALL])


def test_ranks_with_half_the_heads_make_one_block(key: Path, folder: Path) -> None:
    half = HEADS // 2
    slots = kept(key, folder, heads=half)
    with Taking(key, files=[folder]) as own:
        assert own.reader.found(own.names) == 0
        assert kept(key, folder, heads=half, first=half) == slots
        assert own.finds(ALL)
        assert own.fetch(ALL) == []
        assert own.has(tensors(1), slots)
    with Taking(key, files=[folder], heads=half, first=half) as other:
        assert other.fetch(ALL) == []
        assert other.has(tensors(1, half, half), slots)


def test_what_comes_while_it_runs_is_seen(key: Path, folder: Path) -> None:
    with Taking(key, files=[folder]) as own:
        slots = kept(key, folder)
        assert own.finds(ALL)
        assert own.fetch(ALL) == []
        assert own.has(tensors(1), slots)
        segments_of(folder)[0].unlink()
        until(lambda: not own.reader.found(own.names))


def test_after_a_while_without_blocks_those_kept_are_there(
    key: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "IDLE_S", 0.1)
    with Listing(key) as own, Taking(key, files=[folder]) as other:
        writes = own.keep(folder)
        try:
            assert other.finds(ALL)
        finally:
            writes.close()


def test_a_flipped_bit_is_a_miss(key: Path, folder: Path) -> None:
    slots = kept(key, folder)
    (path,) = segments_of(folder)
    with Taking(key, files=[folder]) as own:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size - ALL * 160 - 32 - 3 * BLOCK - 5)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 8]))
        assert own.fetch(ALL) == [own.names[ALL - 4]]
        assert own.wrong == 1
        assert own.reader.found(own.names) == ALL - 4  # it is not there any more
        assert own.fetch(ALL) == [own.names[ALL - 4]]
        assert own.wrong == 1
        same = [*range(ALL - 4), *range(ALL - 3, ALL)]
        theirs = tensors(1)
        for layer, each in enumerate(own.cache):
            assert (each[:, same] == theirs[layer][:, [slots[at] for at in same]]).all()


@pytest.mark.parametrize("at", [0, 8, 100, 4095, -1, -33, -200, -32 - ALL * 160])
def test_a_changed_index_is_refused(key: Path, folder: Path, at: int) -> None:
    kept(key, folder)
    (path,) = segments_of(folder)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with Taking(key, files=[folder]) as own:
        assert own.reader.found(own.names) == 0


@pytest.mark.parametrize("random_seed", range(3))
def test_random_files_are_refused(key: Path, folder: Path, random_seed: int) -> None:
    kept(key, folder)
    (path,) = segments_of(folder)
    whole, dice = path.read_bytes(), random.Random(random_seed)
    for number in range(40):
        data = bytearray(whole[: dice.randrange(len(whole))] if number % 2 else whole[:-1])
        for _ in range(dice.randrange(3)):
            if data:
                data[dice.randrange(min(len(data), 9000))] = dice.randrange(256)
        path.with_name(f"{number}.safetensors").write_bytes(data)
    path.unlink()
    (path.parent / "a.safetensors").mkdir()
    os.mkfifo(path.parent / "b.safetensors")
    (folder / f"{path.parent.name}9").mkdir()
    with Taking(key, files=[folder, folder / "absent"]) as own:
        assert own.reader.found(own.names) == 0
        assert len(own.fetch(ALL)) == ALL


def test_a_file_that_shrinks_is_a_miss(key: Path, folder: Path) -> None:
    kept(key, folder)
    (path,) = segments_of(folder)
    with Taking(key, files=[folder]) as own:
        os.truncate(path, 4096 + 10 * BLOCK + 1)
        failed = own.fetch(ALL)
        assert set(own.names[10:ALL]) <= set(failed)


def test_others_blocks_are_not_seen(key: Path, folder: Path, tmp_path: Path) -> None:
    kept(key, folder)
    with Taking(key_file(tmp_path, "other.key"), files=[folder]) as own:
        (path,) = segments_of(folder)
        assert own.names[0] not in path.read_bytes()
        assert own.reader.found(own.names) == 0
        shelf = next(iter(own.reader._peers.values()))
        assert shelf.heads() == range(0)  # nothing of it is believed
    with Taking(key, form=other_form(version="2"), files=[folder]) as own:
        assert own.reader.found(own.names) == 0
        assert not own.reader.peers()


def test_a_folder_stays_within_its_bound(key: Path, folder: Path) -> None:
    most = 10 * (BLOCK + 4096)
    with Listing(key) as own, Taking(key, files=[folder]) as other:
        writes = KvFiles(own.pool, folder, most, settings=own.settings)
        for block in own.names:
            writes.keep(block)
        while writes._queue.qsize():
            # (One that is renamed meanwhile is seen twice.)
            assert sum(each[1] for each in writes._files()) <= most + writes._full.nbytes()
        writes.close()
        assert writes.error is None
        assert sum(each[1] for each in writes._files()) <= most
        there = {name for name in own.names if other.reader.wait_for([name], 0.2)}
        assert set(own.names[-4:]) <= there < set(own.names)
        # What is read stays, in place of what is not.
        (oldest,) = [each for each in own.names if each in there][:1]
        until(lambda: not other.fetch_one(oldest))
        writes = KvFiles(own.pool, folder, most, settings=own.settings)
        writes.keep(next(each for each in own.names if each not in there))
        writes.close()
        time.sleep(0.2)
        assert other.reader.found([oldest])
    with Listing(key) as own, pytest.raises(ConfigError, match="no room"):
        KvFiles(own.pool, folder, BLOCK, settings=own.settings)


def test_nothing_else_in_the_folder_is_removed(key: Path, folder: Path) -> None:
    kept(key, folder)
    (path,) = segments_of(folder)
    others = [
        folder / "model" / f"{'a' * 16}.safetensors",
        path.with_name("model-00001.safetensors"),
        path.with_name(f"{'b' * 16}.bin"),
    ]
    for each in others:
        each.parent.mkdir(exist_ok=True)
        each.write_bytes(bytes(1 << 20))
        os.utime(each, (0, 0))
    with Listing(key, count=SLOTS, seed=2) as own:
        writes = own.keep(folder, 4 * (BLOCK + 4096))
        writes.close()
    assert all(each.exists() for each in others)
    assert path not in segments_of(folder)


def test_a_full_disk_keeps_what_was_kept(child: KvChild, key: Path, folder: Path) -> None:
    slots = child.ask(f"(own := Listing({str(key)!r}, count=10)).slots")
    child.ask(f"own.keep({str(folder)!r}).close()")
    child.ask("__import__('resource').setrlimit(__import__('resource').RLIMIT_FSIZE, (9000, 9000))")
    child.ask(
        f"own.pool.clear() or own.pool.publish({'b' * 32!r}.encode(), own.pool.take(1, 5)[0])"
    )
    child.ask(
        f"(files := KvFiles(own.pool, {str(folder)!r}, 1 << 30, settings=own.settings)) and None"
    )
    child.ask("files.keep(b'b' * 32)")
    child.ask("files.close()")
    assert "File too large" in child.ask("str(files.error)")
    assert child.ask("files.written") == 0
    assert not list(folder.glob("*/*.mx-partial"))
    with Taking(key, files=[folder]) as own:
        assert own.fetch(10) == []
        assert own.has(tensors(1), slots)


def test_what_is_evicted_meanwhile_is_not_kept(key: Path, folder: Path) -> None:
    """Slots are written again and again while their blocks are to be kept."""
    with Listing(key, count=0) as own, Taking(key, files=[folder]) as other:
        writes = own.keep(folder)
        looping = threading.Thread(target=other.loop, args=(40,))
        looping.start()
        try:
            until_s = time.monotonic() + 4
            at = 0
            while time.monotonic() < until_s:
                (slot,) = own.pool.take(1, 5)
                for number, layer in enumerate(own.cache):
                    layer[:, slot] = 1000 * (at % 40) + number
                own.pool.publish(other.names[at % 40], slot)
                writes.keep(other.names[at % 40])
                if own.pool.counts()["listed"] > SLOTS - 4:
                    own.pool.withdraw(own.pool.newest()[-8:])
                at += 1
        finally:
            writes.close()
            other.ending = True
            looping.join()
        assert at > SLOTS
        assert other.mistaken == 0
        assert other.wrong == 0
        assert writes.written


@pytest.mark.long
@pytest.mark.chaos
def test_a_writer_that_is_killed_leaves_whole_blocks(
    commands_are_forked: None, key: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(3)
    with Taking(key, files=[folder]) as own:
        for _ in range(25):
            with kv_child() as child:
                slots = child.ask(f"(own := Listing({str(key)!r})).slots")
                child.ask(f"(files := own.keep({str(folder)!r}, {30 * BLOCK})) and None")
                time.sleep(dice.random() * 0.02)
                child.send_signal(signal.SIGKILL)
                child.wait()
            time.sleep(0.1)
            failed = own.fetch(ALL)
            right = [at for at in range(ALL) if own.names[at] not in failed]
            theirs = tensors(1)
            for layer, each in enumerate(own.cache):
                assert (each[:, right] == theirs[layer][:, [slots[at] for at in right]]).all()
        assert own.wrong == 0
    # What they have left is removed once it is old.
    monkeypatch.setattr(files, "_STALE_S", -1.0)
    kept(key, folder)
    assert not list(folder.glob("*/*.mx-partial"))


def test_a_forked_child_leaves_files_alone(child: KvChild, key: Path, folder: Path) -> None:
    child.ask(f"(own := Listing({str(key)!r})).slots")
    child.ask(f"(files := own.keep({str(folder)!r})) and None")
    code = "os._exit(0 if [files.close()] else 1)"
    child.ask("(os := __import__('os')) and None")
    assert child.ask(f"os.waitpid(os.fork() or {code}, 0)[1]") == 0
    child.ask("files.close()")
    with Taking(key, files=[folder]) as own:
        assert own.fetch(ALL) == []


def test_files_of_a_snapshot_hold_the_newest(key: Path, folder: Path) -> None:
    with Listing(key) as own:
        assert freeze_blocks(NAME, folder, 5 * BLOCK, settings=own.settings) == 5
        with Taking(key, files=[folder]) as other:
            assert other.reader.found(own.names) == 5  # a prompt's beginning
            assert other.fetch(5) == []


def test_what_is_not_of_use_makes_room_and_ends_of_prompts_first(key: Path) -> None:
    with Listing(key, count=12) as own:
        other = names(own.settings, 8, first=7)
        slots = own.pool.take(len(other))
        for block, slot, after in zip(other, slots, [b"", *other[:-1]], strict=True):
            own.pool.publish(block, slot, after=after)
        own.pool.used([own.names[5]])  # a prompt that begins as the first one does
        assert own.pool.counts()["free"] == 12
        own.pool.give_back(own.pool.take(12))  # and as many are made free for the next time
        assert own.pool.newest() == [*own.names[:6], *other[:2]]


def test_the_header_has_one_size() -> None:
    one = segments.Segment(FORM.encode(), 0, HEADS, (7, 9), 1)
    many = segments.Segment(FORM.encode(), 0, HEADS, (7, 9), segments.MOST_ROWS)
    assert len(one.header()) == len(many.header())


def test_a_sparse_segment_costs_no_memory(key: Path, folder: Path) -> None:
    kept(key, folder)
    (path,) = segments_of(folder)
    huge = segments.Segment(FORM.encode(), 0, HEADS, (1,) * 4096, segments.MOST_ROWS)
    path.write_bytes(huge.header())
    os.truncate(path, huge.nbytes())
    with pytest.raises(CheckpointError, match="more KV blocks"):
        segments.read_index(path, bytes(32))
    with Taking(key, files=[folder]) as own:
        assert own.reader.found(own.names) == 0
