"""Ranks on one host that read a checkpoint from a disk without digests: each block is read once in
all, and what one of them does, or does not do any more, spoils nothing for the others."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import mx
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx import api
from mx.core.grid import ChunkGrid
from mx.core.local_ranks import Shares, bits, index_nbytes
from mx.errors import CheckpointError, LocalError, MxError
from mx.snapshots.shared_reading import _all_of, _dealt, _packed, _SharedReading
from mx.storage.disk_file import DiskBytes
from tests.integration.scripts import script
from tests.support.disk_ranks import patient, right_of, slices_of
from tests.support.folders import manifest_of
from tests.support.tensors import same
from tests.support.transfer_machine import grid_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

#: Other runs of these tests on this host read equal files.
GROUP = str(os.getpid())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_checkpoint(folder / "model.safetensors", llama_shapes(4, 512, 1024, 2048))
    (folder / "config.json").write_text("{}")
    return folder


class Ranks:
    """Pulls of all ranks, each on a thread of this process."""

    def __init__(self, folder: Path, ranks: int, group: str, name: str = "m", **how: Any) -> None:
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.reports: dict[int, api.PullReport] = {}
        self.errors: dict[int, MxError] = {}

        def one(rank: int) -> None:
            local = mx.LocalRanks(rank, ranks, f"{GROUP}-{group}", wait_s=60)
            options = {"slices": slices_of(rank, ranks)} | how
            try:
                with api.pull(
                    name, path=folder, local_ranks=local, settings=patient(), **options
                ) as pull:
                    self.reports[rank] = pull.wait(120)
                    self.tensors[rank] = {n: t.clone() for n, t in pull.state_dict().items()}
            except MxError as error:
                self.errors[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)


class Counted:
    """Counts what is read from disks, and fails a read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = -1) -> None:
        self.nbytes = self.reads = 0
        lock, read = threading.Lock(), DiskBytes.read_exactly

        def counted(bytes_: DiskBytes, view: memoryview, position: int, nbytes: int) -> None:
            with lock:
                self.nbytes += nbytes
                number, self.reads = self.reads, self.reads + 1
            if number == fails_at:
                raise LocalError("the disk fails")
            read(bytes_, view, position, nbytes)

        monkeypatch.setattr(DiskBytes, "read_exactly", counted)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_block_is_read_once(
    weights: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, pinned: bool
) -> None:
    right = manifest_of(weights)
    counted = Counted(monkeypatch)
    name = f"m@{right.ref.pin.hex()}" if pinned else "m"
    found = Ranks(weights, ranks, f"once-{ranks}-{pinned}", name)
    assert not found.errors
    for rank in range(ranks):
        report = found.reports[rank]
        assert same(found.tensors[rank], right_of(weights, rank, ranks))
        assert report.verified == "rank" and report.identity == right.ref.identity.hex()
        assert report.defined_by == ("" if pinned else "disk")
        assert {path.transport for path in report.paths} == {"disk", "rank"}
    # Windows begin and end at pages.
    assert counted.nbytes <= 1.05 * right.layout.payload_nbytes
    moved = sum(report.moved_bytes or 0 for report in found.reports.values())
    assert moved == right.layout.payload_nbytes


def test_what_no_rank_wants_is_hashed_by_one(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = manifest_of(weights)
    counted = Counted(monkeypatch)
    found = Ranks(weights, 2, "unwanted", only="*q_proj*", slices=None)
    assert not found.errors
    for rank in range(2):
        whole = load_file(weights / "model.safetensors")
        assert same(found.tensors[rank], {n: t for n, t in whole.items() if "q_proj" in n})
        assert found.reports[rank].identity == right.ref.identity.hex()
    assert counted.nbytes <= 1.05 * right.layout.payload_nbytes


def test_a_wrong_pin_is_refused_by_all(weights: Path) -> None:
    found = Ranks(weights, 2, "wrong", "m@" + 31 * "0")
    assert not found.tensors
    assert all(isinstance(found.errors[rank], CheckpointError) for rank in range(2))


def test_a_rank_whose_disk_fails_leaves_its_share_to_the_other(
    weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Counted(monkeypatch, fails_at=5)
    found = Ranks(weights, 2, "fails")
    ((bad, error),) = found.errors.items()
    assert "the disk fails" in str(error)
    assert same(found.tensors[1 - bad], right_of(weights, 1 - bad, 2))


def test_weights_that_change_meanwhile_are_given_to_none(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((weights / "model.safetensors").read_bytes())
    read, lock, left = _SharedReading._read, threading.Lock(), [4]

    def changing(reading: _SharedReading, *arguments: Any) -> None:
        with lock:
            left[0] -= 1
            if not left[0]:
                with file.open("r+b") as written:
                    written.seek(-1, os.SEEK_END)
                    written.write(b"?")
                os.utime(file, ns=(1, 1))
        read(reading, *arguments)

    monkeypatch.setattr(_SharedReading, "_read", changing)
    found = Ranks(tmp_path, 2, "changing")
    assert not found.tensors
    assert all("changed" in str(found.errors[rank]) for rank in range(2))


RANK = """
import json
import mx
from mx.snapshots.shared_reading import _SharedReading
from tests.support.disk_ranks import patient, right_of, slices_of
from tests.support.tensors import same
from pathlib import Path
folder, rank, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:4])
group, silent_s, stops = sys.argv[4:7]
read, left = _SharedReading._read, [3]
def stopping(reading, *arguments):
    left[0] -= 1
    if stops and left[0] == 0:
        print("reads", flush=True)
        os.kill(os.getpid(), getattr(signal, stops))
    read(reading, *arguments)
_SharedReading._read = stopping
local = mx.LocalRanks(rank, ranks, group, wait_s=60)
with api.pull(
    "m", path=folder, slices=slices_of(rank, ranks), local_ranks=local, settings=patient(silent_s)
) as pull:
    report = pull.wait(120)
    assert same(pull.state_dict(), right_of(folder, rank, ranks))
print(json.dumps([report.identity, report.moved_bytes]), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "SIGINT"])
def test_the_share_of_a_rank_that_is_gone_is_read_by_the_others(
    weights: Path, how: str, victim: int
) -> None:
    right, ranks = manifest_of(weights), 4
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                script(
                    RANK, str(weights), str(rank), str(ranks), f"{GROUP}-{how}-{victim}",
                    "8" if how == "SIGSTOP" else "60",
                    how if rank == victim else "", imported="torch",
                )
            )
            for rank in range(ranks)
        ]  # fmt: skip
        moved = 0
        for rank, process in enumerate(processes):
            if rank != victim:
                out, err = process.communicate(timeout=200)
                assert process.returncode == 0, err
                identity, nbytes = json.loads(out.splitlines()[-1])
                assert identity == right.ref.identity.hex()
                moved += nbytes
        process = processes[victim]
        process.send_signal(signal.SIGCONT)
        out, err = process.communicate(timeout=200)
        if how == "SIGSTOP":  # it comes to its end, too, when it goes on
            assert process.returncode == 0, err
            assert json.loads(out.splitlines()[-1])[0] == right.ref.identity.hex()
        else:
            assert process.returncode
        assert out.startswith("reads")
    # What it had left was read by each of the others.
    assert right.layout.payload_nbytes < moved + right.layout.payload_nbytes // ranks
    if how != "SIGSTOP":  # by which a rank that is only late may be left, too
        assert moved < 2 * right.layout.payload_nbytes


@given(
    blocks=st.lists(st.integers(1, 11), min_size=1, max_size=6),
    ranks=st.integers(2, 5),
    data=st.data(),
)
def test_each_block_has_one_rank_that_reads_it(
    blocks: list[int], ranks: int, data: st.DataObject
) -> None:
    grid: ChunkGrid = grid_of(blocks)
    wanted = [
        [data.draw(st.integers(0, (1 << grid.block_count(c)) - 1)) for c in range(len(grid))]
        for _ in range(ranks)
    ]
    indices = {rank: _packed(grid, masks) for rank, masks in enumerate(wanted)}
    assert all(len(index) == index_nbytes(grid) for index in indices.values())
    dealt = _dealt(grid, indices)
    packed = {rank: _packed(grid, masks) for rank, masks in dealt.items()}
    views = [Shares(grid, rank, _all_of(grid, dealt[rank]), packed) for rank in range(ranks)]
    for chunk in range(len(grid)):
        read = [
            bits(part)
            for parts in views[0].read_by.values()
            for part in parts
            if part.chunk == chunk
        ]
        assert sum(read) == (1 << grid.block_count(chunk)) - 1  # each once
    for rank, view in enumerate(views):
        assert view.read_by == views[0].read_by
        assert all(dealt[rank][c] & wanted[rank][c] == wanted[rank][c] for c in range(len(grid)))
        given = {part for other in view.expected.values() for part in other}
        assert given <= {part for parts in view.read_by.values() for part in parts}
