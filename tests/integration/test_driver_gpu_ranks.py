"""Ranks that each fill a GPU from one folder, over the stand-in driver: each reads its share from
the disk and takes the rest from the others' memory; and what one of them does wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mx import api, config
from mx.units import MIB
from tests.support.driver.logs import copied, kept, parsed
from tests.support.driver.programs import each_major, each_major_at_leisure, finish

pytestmark = [pytest.mark.integration]
_LONG = pytest.mark.long

LAYERS, RANKS = 6, 2
#: cuFile as with nvidia-fs.
_DIRECT: dict[str, Any] = {"CUFILE": "direct"}
SETTINGS = config.load(environ={"HOME": "/nonexistent"})

#: Into an engine's own memory.
_INTO = """
from tests.support.driver.arrays import empty
want = load_file(FOLDER + "/model.safetensors")
into = empty({name: each.shape for name, each in want.items()}, ordinal=RANK, dtype="|u1")
how = {"into": into}
def compare(pull):
    for name, values in want.items():
        assert (into[name].get() == values).all(), name
"""
#: What is not read in windows.
_READ = """
from mx.storage.disk_file import DiskBytes
exactly = DiskBytes.read_exactly
def counts(self, view, position, nbytes):
    windows.append(nbytes)
    exactly(self, view, position, nbytes)
DiskBytes.read_exactly = counts
"""
_STRONG = 'how["verify"] = "strong"'
#: One rank's pull; prints what it says, how many bytes came from the disk, and how many parts the
#: processor hashed.
_RANK = """
import json, signal
import mx
import mx.core.digest
from mx import api, config
from mx.errors import MxError
from mx.memory import tensors
from mx.snapshots.device import Windows
from mx.testing import spans
from safetensors.numpy import load_file

FOLDER, NAME, RANK, RANKS = {folder!r}, {name!r}, {rank}, {ranks}
environ = {{"HOME": "/nonexistent", "MX_PEER_STALL_TIMEOUT_S": "{silent_s}"}}
settings = config.load(environ=environ)
windows, hashed, bad = [], [], {bad}
read, digests = Windows.read, mx.core.digest.BlockHasher.block_digests
def counted(self, pieces, *arguments, **options):
    windows.extend((place >> 48) % (1 << 24) for place, _ in pieces)
    reads(len(windows))
    read(self, pieces, *arguments, **options)
def hashes(self):
    hashed.append(self)
    return digests(self)
Windows.read = counted
mx.core.digest.BlockHasher.block_digests = hashes
reads = lambda number: None
how = {{"device": f"cuda:{{RANK}}"}}
def compare(pull):
    view, manifest = pull.device_buffer(), pull.manifest
    host = tensors.state_dict(memoryview(bytearray(spans.peek(view))), manifest.layout)
    for name, values in load_file(FOLDER + "/model.safetensors").items():
        assert bad or (host[name].numpy() == values).all(), name
{everywhere}
if bad:
{does}
local = mx.LocalRanks(RANK, RANKS, {group!r}, wait_s=100)
try:
    with api.pull(NAME, path=FOLDER, settings=settings, local_ranks=local, **how) as pull:
        said = pull.wait(200).to_json()
        compare(pull)
except MxError as error:
    said = {{"error": type(error).__name__, "message": str(error)}}
    del error
print(json.dumps(said | {{"read": sum(windows), "hashed": len(hashed)}}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, str]:
    """A checkpoint as a pull has written it, of tensors that begin anywhere, and its pin."""
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{layer}.w{number}": random.integers(0, 256, size, dtype=np.uint8)
        for layer in range(LAYERS)
        for number, size in enumerate((3 * MIB, 17, 5_000_011, MIB))
    }
    save_file(tensors, tmp_path / "model.safetensors")
    out = tmp_path / "out"
    path = tmp_path / "model.safetensors"
    with api.pull("m", path=path, out=out, settings=SETTINGS) as pull:
        return out, pull.wait(60).pin


class Ranks:
    """What each rank has said; of one that did not live to say anything {}."""

    def __init__(
        self,
        major: int,
        folder: tuple[Path, str],
        does: str = "pass",
        bad: int = -1,
        *,
        pinned: bool = True,
        ranks: int = RANKS,
        silent_s: int = 100,
        everywhere: str = "",
        **settings: Any,
    ) -> None:
        self.log = folder[0].parent / "log"
        self.log.mkdir()
        indented = "".join(f"    {line}\n" for line in does.splitlines())

        def run(rank: int) -> subprocess.CompletedProcess[str]:
            code = _RANK.format(
                folder=str(folder[0]),
                name="m@" + folder[1] if pinned else "m",
                rank=rank,
                ranks=ranks,
                silent_s=silent_s,
                bad=rank == bad,
                does=indented,
                group=f"{os.getpid()}",
                everywhere=everywhere,
            )
            environment = {"LOG": self.log, "KERNELS": True, "DEVICES": max(2, ranks)}
            return finish(major, code, **environment | settings)

        with ThreadPoolExecutor(ranks) as pool:
            self.ended = list(pool.map(run, range(ranks)))
        self.said: list[dict[str, Any]] = []
        for rank, ended in enumerate(self.ended):
            assert rank == bad or not ended.returncode, ended.stderr
            self.said.append(json.loads(ended.stdout.splitlines()[-1]) if ended.stdout else {})

    def given_back(self) -> None:
        for each in self.log.glob("*.log"):
            assert kept(parsed(each.read_text().splitlines())) == []

    def brought(self, rank: int) -> dict[str, int]:
        """Return the bytes that came from the disk, and from each other rank."""
        found: dict[str, int] = {}
        for path in self.said[rank]["paths"]:
            source = path["source"] if path["source"].startswith("rank ") else "disk"
            found[source] = found.get(source, 0) + path["bytes"]
        return found


@each_major
@pytest.mark.parametrize("settings", [{}, _DIRECT], ids=["slots", "gds"])
def test_each_byte_is_read_once_and_by_no_processor(
    major: int, folder: tuple[Path, str], settings: dict[str, Any]
) -> None:
    found = Ranks(major, folder, **settings)
    nbytes = found.said[0]["bytes"]
    for rank, said in enumerate(found.said):
        assert said["verified"] == "digest" and not said["hashed"] and not said["retries"]
        brought = found.brought(rank)
        assert brought["disk"] + brought[f"rank {1 - rank}"] == nbytes
        assert 0.4 * nbytes < brought["disk"] < 0.6 * nbytes
        assert {path["transport"] for path in said["paths"]} == {"disk", "cuda_ipc"}
    assert nbytes <= sum(each["read"] for each in found.said) <= 1.05 * nbytes
    # What is not up from slots is tables of digests; what goes between GPUs stays there.
    up, within = copied(found.log, "cuMemcpyHtoDAsync"), copied(found.log, "cuMemcpyDtoDAsync")
    if settings:
        assert nbytes <= copied(found.log, "cuFileRead") <= 1.05 * nbytes
        assert up < nbytes // 500 and within == 2 * nbytes
    else:
        assert nbytes <= up <= 1.01 * nbytes and within == nbytes
    # The programs themselves look at all bytes in the end.
    assert copied(found.log, "cuMemcpyDtoHAsync") < 2 * nbytes + nbytes // 500
    found.given_back()


@_LONG
@each_major_at_leisure
@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"NVLINK": "none"}, "pcie_p2p"),
        ({"NVLINK": "none", "PEERS": "none"}, "pcie_p2p"),  # through pinned memory
        ({"NO_VMM": True, "LATE_US": 2000}, "cuda_ipc"),
    ],
    ids=["pcie", "no-peers", "legacy"],
)
def test_by_the_paths_that_there_are(
    major: int, folder: tuple[Path, str], settings: dict[str, Any], path: str
) -> None:
    found = Ranks(major, folder, **_DIRECT | settings)
    nbytes = found.said[0]["bytes"]
    assert nbytes <= sum(each["read"] for each in found.said) <= 1.05 * nbytes
    for said in found.said:
        assert {each["transport"] for each in said["paths"]} == {"disk", path}
    found.given_back()


@each_major_at_leisure
@pytest.mark.parametrize(
    "everywhere",
    [
        pytest.param(_INTO, id="into"),
        pytest.param("", marks=_LONG, id="new"),
        pytest.param(_STRONG, marks=_LONG, id="strong"),
    ],
)
def test_without_a_pin_the_digests_beside_the_weights_say_what_they_are(
    major: int, folder: tuple[Path, str], everywhere: str
) -> None:
    found = Ranks(major, folder, pinned=False, everywhere=everywhere)
    nbytes = found.said[0]["bytes"]
    for said in found.said:
        assert said["pin"] == folder[1] and said["defined_by"] == "disk"
    assert sum(each["read"] for each in found.said) <= 1.05 * nbytes


@_LONG
@each_major_at_leisure
@pytest.mark.parametrize("pinned", [True, False])
def test_without_digests_each_block_passes_through_the_host_once(
    major: int, folder: tuple[Path, str], pinned: bool
) -> None:
    shutil.rmtree(folder[0] / "digests")
    found = Ranks(major, folder, pinned=pinned, everywhere=_READ)
    nbytes = found.said[0]["bytes"]
    assert nbytes <= sum(each["read"] for each in found.said) <= 1.05 * nbytes
    for rank, said in enumerate(found.said):
        assert said["pin"] == folder[1] and said["verified"] == "rank"
        assert [path["transport"] for path in said["paths"]] == ["disk", "rank"]
        assert sum(found.brought(rank).values()) == nbytes
    found.given_back()


# --- one of them


_KILLED = """
def reads(number):
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
"""
#: It withdraws what the others read from when it has shown something.
_REFUSES = """
from mx.snapshots.gpu_ranks import GpuRanks
show, expose = GpuRanks.chunk_verified, GpuRanks._expose
def exposes(self, *arguments):
    self.held = expose(self, *arguments)
    return self.held
def shows(self, chunk):
    show(self, chunk)
    for each in self.held.values():
        each.close()
GpuRanks.chunk_verified, GpuRanks._expose = shows, exposes
"""
#: It says nothing that is understood.
_NO_TICKET = """
from mx.snapshots.gpu_ranks import GpuRanks
trade = GpuRanks._trade
def trades(self, said):
    return trade(self, dict.fromkeys(said, "[" * 1000))
GpuRanks._trade = trades
"""
#: It gives bytes that it did not read, from the fourth chunk on.
_LIES = """
from mx.snapshots.gpu_ranks import GpuRanks
show = GpuRanks.chunk_verified
def shows(self, chunk):
    place = self._transfer.grid.chunk(chunk)
    if chunk > 3:
        at = self._transfer.grid.layers[place.layer].arena_offset + place.begin
        spans.poke(self._transfer.arena[at : at + 1], b"?")
    show(self, chunk)
GpuRanks.chunk_verified = shows
"""
#: It is not heard of after a few chunks, and ends once the others have.
_SILENT = """
from mx.snapshots.gpu_ranks import GpuRanks
def silent(self):
    for other in self._others.values():
        other.fellow.sock.setblocking(True)
        other.fellow.sock.recv(1)
    os._exit(3)
show = GpuRanks.chunk_verified
GpuRanks.chunk_verified = lambda self, chunk: chunk > 12 or show(self, chunk)
GpuRanks._look = silent
"""
_EIO = """
import errno
pread = os.preadv
def fails(fd, views, position):
    if position > 20 << 20:
        raise OSError(errno.EIO, "Input/output error")
    return pread(fd, views, position)
os.preadv = fails
"""


@each_major_at_leisure
@pytest.mark.parametrize(
    ("does", "settings"),
    [
        pytest.param(_KILLED, _DIRECT, id="killed"),
        pytest.param(_LIES, {}, id="lies"),
        pytest.param(_KILLED, {}, marks=_LONG, id="killed-slots"),
        pytest.param(_LIES, _DIRECT, marks=_LONG, id="lies-gds"),
        pytest.param(_REFUSES, _DIRECT, marks=_LONG, id="refuses"),
        pytest.param(_NO_TICKET, {}, marks=_LONG, id="says nonsense"),
        pytest.param(_SILENT, _DIRECT, marks=_LONG, id="silent"),
    ],
)
def test_what_one_does_not_bring_the_others_read(
    major: int, folder: tuple[Path, str], does: str, settings: dict[str, Any]
) -> None:
    silent_s = 6 if does == _SILENT else 300
    for _ in range(3):  # one that gets no processor brings less, and the other reads it itself
        found = Ranks(major, folder, does, 1, ranks=3, silent_s=silent_s, **settings)
        least = found.said[0]["bytes"]
        for rank in (0, 2):  # whose program has compared every byte
            said, brought = found.said[rank], found.brought(rank)
            assert said["verified"] == "digest" and sum(brought.values()) == said["bytes"]
            least = min(least, brought[f"rank {2 - rank}"])
            assert brought["disk"] >= 0.3 * said["bytes"]
            assert bool(said["retries"]) >= (does == _LIES)
            assert "rank 1 is not read from" in found.ended[rank].stderr
        if least > found.said[0]["bytes"] // 4:
            break
    assert least > found.said[0]["bytes"] // 4
    # Each may take from the other what that has read in place of the one.
    read = sum(found.brought(rank)["disk"] for rank in (0, 2))
    assert read > 2 * found.said[0]["bytes"] // 3 + MIB
    assert found.ended[1].returncode == {_KILLED: -9, _SILENT: 3}.get(does, 0)


@_LONG
@each_major_at_leisure
def test_a_rank_whose_disk_fails_leaves_its_share_to_the_other(
    major: int, folder: tuple[Path, str]
) -> None:
    found = Ranks(major, folder, _EIO, 1)
    assert "Input/output error" in found.said[1]["message"]
    assert sum(found.brought(0).values()) == found.said[0]["bytes"]
    found.given_back()


@_LONG
@each_major_at_leisure
def test_when_cufile_lies_to_each_slots_go_on(major: int, folder: tuple[Path, str]) -> None:
    found = Ranks(major, folder, **_DIRECT, FAIL="cuFileRead:5:2")
    for said in found.said:
        (how,) = [path["detail"] for path in said["paths"] if path["transport"] == "disk"]
        assert how.startswith("by cufile, then through pinned slots: ") and said["retries"]
    assert sum(each["read"] for each in found.said) <= 1.2 * found.said[0]["bytes"]


@_LONG
@each_major_at_leisure
@pytest.mark.parametrize("settings", [{}, _DIRECT], ids=["slots", "gds"])
def test_a_file_that_has_changed_is_refused_by_all(
    major: int, folder: tuple[Path, str], settings: dict[str, Any]
) -> None:
    path = folder[0] / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    found = Ranks(major, folder, **settings)
    assert {said["error"] for said in found.said} == {"DigestError"}
    found.given_back()
