"""The stand-in's NVML under the real nvidia-ml-py, and what `mx.hardware.gpus` reads there."""

from __future__ import annotations

from pathlib import Path

from tests.support.driver.programs import each_major, passes

pytestmark = each_major

#: Prints what mx reads, and the UUIDs that CUDA says.
_READ = """
from pathlib import Path
from mx.hardware.gpus import read_gpus
found = read_gpus(root=Path({root!r}))
print(found.reason)
for gpu in found.gpus:
    print(gpu.index, gpu.nvlinks, gpu.pci_address,
          [(p.nvlinks, p.p2p_read, p.p2p_write, p.relation) for p in gpu.peers])
"""


def root(folder: Path) -> Path:
    (folder / "dev").mkdir()
    (folder / "dev/nvidiactl").touch()
    return folder


def test_gpus_behind_switches(major: int, tmp_path: Path) -> None:
    lines = passes(major, _READ.format(root=str(root(tmp_path))), ROOT=tmp_path)
    assert lines == [
        "",
        "0 18 0000:19:00.0 [(18, True, True, 'nvlink')]",
        "1 18 0000:1a:00.0 [(18, True, True, 'nvlink')]",
    ]


def test_gpus_linked_in_pairs(major: int, tmp_path: Path) -> None:
    lines = passes(
        major,
        _READ.format(root=str(root(tmp_path))),
        DEVICES=3,
        NVLINK="0-1",
        PEERS="1-2",
    )
    assert lines[1:] == [
        "0 4 0000:19:00.0 [(4, False, False, 'nvlink'), (0, False, False, 'host')]",
        "1 4 0000:1a:00.0 [(4, False, False, 'nvlink'), (0, True, True, 'host')]",
        "2 0 0000:1b:00.0 [(0, False, False, 'host'), (0, True, True, 'host')]",
    ]


def test_nvml_does_not_start_without_its_device(major: int, tmp_path: Path) -> None:
    (reason,) = passes(major, _READ.format(root=str(root(tmp_path))), ROOT=tmp_path / "none")
    assert reason.startswith("NVML does not start: Driver Not Loaded")


def test_uuids_are_those_of_cuda(major: int) -> None:
    code = """
import pynvml, uuid
pynvml.nvmlInit()
call("cuInit", 0)
name = "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
for n in range(2):
    handle = pynvml.nvmlDeviceGetHandleByIndex(n)
    if pynvml.nvmlDeviceGetMigMode(handle)[0]:
        assert pynvml.nvmlDeviceGetUUID(handle).startswith("GPU-")
        handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
        assert pynvml.nvmlDeviceIsMigDeviceHandle(handle)
    found = pynvml.nvmlDeviceGetUUID(handle)
    assert pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByUUID(found)).startswith("Stand-in")
    print(found[:4], found[4:] == str(uuid.UUID(bytes=bytes(call(name, n).bytes))))
"""
    assert passes(major, code) == ["GPU- True"] * 2
    assert passes(major, code, MIG=2) == ["MIG- True"] * 2
