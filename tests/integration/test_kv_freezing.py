"""KV blocks in a snapshot: those of the processes that serve a model, or of one process, at a call
or a signal."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

import mx
from mx.errors import MxError, PeerProtocolError
from mx.kv import KvKey, freeze_blocks
from mx.snapshots.container import SNAPSHOT, read
from tests.support.commands import Run
from tests.support.kv_blocks import (
    FORM,
    HEADS,
    NAME,
    KvChild,
    Taking,
    key_file,
    kv_child,
    names,
    settings,
    tensors,
    until,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ALL = 20
BLOCK = 4 * 2 * HEADS * 8 * 16 * 4  # bytes


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return key_file(tmp_path)


class Replicas:
    """Processes that serve the same weights, each with a pool of KV blocks."""

    def __init__(self, key: Path, coordinator: str, exits: ExitStack) -> None:
        self.key, self.coordinator, self._exits = str(key), coordinator, exits

    def add(self, pool: str, variant: str = "checkpoint") -> KvChild:
        child = self._exits.enter_context(kv_child())
        more = f"coordinator={self.coordinator!r}"
        if pool:
            child.ask(f"(own := Listing({self.key!r}, {pool}, {more})).slots")
        child.ask("(mx := __import__('mx')) and None")
        child.ask(
            "(source := mx.serve({'w': np.arange(1 << 16, dtype=np.float32)}, "
            f"model={NAME!r}, variant={variant!r}, settings=settings({self.key!r}, {more}))).pinned"
        )
        return child

    def freeze(self, folder: Path, blocks: int, **how: object) -> mx.FreezeReport:
        """Freeze the model from here, with so many blocks of each rank."""
        given = settings(self.key, coordinator=self.coordinator)
        return mx.freeze(NAME, folder, kv_bytes=blocks * BLOCK, settings=given, **how)


@pytest.fixture
def replicas(key: Path, coordinator: str, commands_are_forked: None) -> Iterator[Replicas]:
    with ExitStack() as exits:
        yield Replicas(key, coordinator, exits)


def frozen(folder: Path, key: Path, *salt: str, seed: int = 1) -> list[int]:
    """Return which blocks of a prompt a snapshot has, and see that they are right."""
    with Taking(key, files=[folder / "kv"]) as own:
        there = []
        for at, block in enumerate(names(settings(key), ALL, *salt)):
            if own.reader.found([block]) and own.fetch_one(block) == set():
                assert own.has(tensors(seed), [at])
                there.append(at)
        return there


def test_the_prompts_of_use_last_of_all_replicas_are_frozen(
    replicas: Replicas, key: Path, tmp_path: Path, run: Run
) -> None:
    replicas.add("1")
    second = replicas.add("2, shared_with=['salt']")
    replicas.add("1")  # the same ones as the first has
    replicas.add("")
    second.ask("own.pool.used([own.names[0]])")
    out = tmp_path / "s"
    command = run(
        *("freeze", NAME, str(out), "--kv", f"{8 * BLOCK}", "--json"),
        *("--coordinator", replicas.coordinator, "--name-key", str(key)),
    )
    report = command.json()
    assert command.wait() == 0, report
    assert report["kv_blocks"] == 8 and report["complete"]
    assert read(out).name == NAME
    of_first, of_second = frozen(out, key), frozen(out, key, "salt", seed=2)
    assert of_first == list(range(len(of_first)))  # the beginnings of both
    assert of_second == list(range(len(of_second)))
    assert len(of_first) + len(of_second) == 8 and min(len(of_first), len(of_second)) >= 2
    assert (out.stat().st_mode | (out / "kv").stat().st_mode) & 0o077 == 0


def test_ranks_are_frozen_each_with_its_heads(
    replicas: Replicas, key: Path, tmp_path: Path
) -> None:
    for first in (0, HEADS // 2):
        replicas.add(f"heads={HEADS // 2}, first={first}")
    assert replicas.freeze(tmp_path / "s", ALL).kv_blocks == 2 * ALL
    assert frozen(tmp_path / "s", key) == list(range(ALL))


def test_who_has_no_blocks_or_no_right_to_them_is_told(
    replicas: Replicas, key: Path, tmp_path: Path
) -> None:
    child = replicas.add("")
    with pytest.raises(MxError, match=r"gives KV blocks .*has no KV blocks of that model"):
        replicas.freeze(tmp_path / "s", ALL)
    replicas.key = str(key_file(tmp_path, "other.key"))
    with pytest.raises(MxError, match="another owner's"):
        replicas.freeze(tmp_path / "s", ALL)
    child.ask(f"(own := Listing({str(key)!r})).slots")
    given = settings(replicas.key)
    with pytest.raises(MxError, match="holders of its name key"):
        freeze_blocks(
            NAME, tmp_path / "kv", 1 << 20, endpoints=[child.ask("own.endpoint")], settings=given
        )
    assert not (tmp_path / "s").exists()
    with pytest.raises(MxError, match=r"KV blocks: 'much' is not a size"):
        mx.freeze(
            NAME,
            tmp_path / "s",
            kv_bytes="much",
            settings=settings(key),
            coordinator=replicas.coordinator,
        )


def test_a_block_that_is_wrong_is_left_out(replicas: Replicas, key: Path, tmp_path: Path) -> None:
    child = replicas.add("1")
    child.ask("own.cache[2].__setitem__((0, own.slots[3], 0, 0, 0), 7.0)")
    assert replicas.freeze(tmp_path / "s", ALL).kv_blocks == ALL - 1
    assert frozen(tmp_path / "s", key) == [at for at in range(ALL) if at != 3]


def test_makers_that_die_or_evict_leave_what_is_right(
    key: Path, tmp_path: Path, commands_are_forked: None
) -> None:
    random = Random(5)
    for number in range(6):
        with kv_child() as child:
            child.ask(f"(own := Listing({str(key)!r}, max_bandwidth='2MB/s')).slots")
            endpoint, after_s = child.ask("own.endpoint"), random.uniform(0.2, 1.2)
            if number % 2:
                child.ask(f"__import__('threading').Timer({after_s}, own.pool.clear).start()")
            else:
                threading.Timer(after_s, child.send_signal, [signal.SIGKILL]).start()
            folder = tmp_path / str(number)
            try:
                count = freeze_blocks(
                    NAME, folder / "kv", 1 << 30, endpoints=[endpoint], settings=settings(key)
                )
            except MxError:
                count = 0
            assert len(frozen(folder, key)) == count


def test_a_signal_freezes_them_too(replicas: Replicas, key: Path, tmp_path: Path) -> None:
    out = tmp_path / "s"
    child = replicas.add("1")
    child.ask(
        f"(freezer := mx.freeze_on_signal(source, {str(out)!r}, kv_bytes={5 * BLOCK}, "
        "settings=own.settings)) and None"
    )
    child.send_signal(signal.SIGUSR1)
    until((out / SNAPSHOT).exists)
    child.ask("freezer.close()")
    assert frozen(out, key) == list(range(5))
    without = replicas.add("")
    said = without.ask(f"mx.freeze(source, {str(tmp_path / 't')!r}, kv_bytes='1MiB')")
    assert said.startswith("ConfigError: this process has no KV blocks")
    assert not (tmp_path / "t").exists()


def test_a_form_is_read_as_it_was_written() -> None:
    assert KvKey.decode(FORM.encode()) == FORM
    said = json.loads(FORM.encode())
    changes: tuple[dict[str, object], ...] = (
        {"heads": 4.0},
        {"heads": True},
        {"heads": 0},
        {"heads": "4"},
        {"more": []},
        {"extra": 1},
        {"layers": None},
    )
    for changed in changes:
        data = json.dumps(said | changed, sort_keys=True).encode()
        with pytest.raises(PeerProtocolError, match="not understood"):
            KvKey.decode(data)
    for data in (b"", b"[]", b"{}", FORM.encode() + b" ", b"[" * 5000):
        with pytest.raises(PeerProtocolError, match="not understood"):
            KvKey.decode(data)
