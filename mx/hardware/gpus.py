"""Reads the GPUs and the links between them through NVML (nvidia-ml-py).

NVML shows every GPU of the machine or container, whatever CUDA_VISIBLE_DEVICES says. A call that
fails, for lack of permission, support or a newer driver, leaves its value unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mx.core.topology import Gpu, GpuPeer
from mx.errors import install_hint
from mx.hardware import sysfs

_DRIVER_SIGNS = ("dev/nvidiactl", "proc/driver/nvidia")
_NO_DRIVER = "there is no NVIDIA driver on this machine"
_NOT_INSTALLED = f"nvidia-ml-py is not installed: {install_hint('cuda13', 'cuda12')}"

# From nvml.h, since nvidia-ml-py's NVML_P2P_CAPS_INDEX_READ is the tuple (0,).
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_OK = 0
_REMOTE_IS_SWITCH = 2
_ACTIVE = 1

#: nvmlGpuTopologyLevel_t, in GpuPeer's words. 0 is two GPUs of one board.
_RELATIONS = {0: "switch", 10: "switch", 20: "bridge", 30: "host", 40: "node", 50: "system"}

#: GB/s of one NVLink lane in one direction, by nvmlNvlinkVersion_t (NVIDIA's data sheets:
#: P100 4 x 20, V100 6 x 25, A100 12 x 25, H100 18 x 25, B200 18 x 50).
_LANE_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 25.0, 6: 25.0, 7: 50.0}
#: Some drivers report Hopper's lanes as version 5; before Blackwell no lane has 50 GB/s.
_BLACKWELL = 10
#: The compute capabilities whose multiprocessors have 64 cores (CUDA's guide); others have 128.
_SMS_OF_64 = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))


class GpusFound(NamedTuple):
    """The GPUs; `reason` says why there are none, or which are missing ("" if none is)."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    reason: str = ""


class _Lanes(NamedTuple):
    """Active NVLink lanes: to other GPUs, by PCI address, and to switches."""

    to_gpus: dict[str, int]
    to_switches: int
    gb_per_s: float

    @property
    def total(self) -> int:
        return sum(self.to_gpus.values()) + self.to_switches


def _pynvml() -> Any:
    return importlib.import_module("pynvml")


def read_gpus(load: Callable[[], Any] = _pynvml, root: Path = Path("/")) -> GpusFound:
    """Return every GPU that NVML shows, by index.

    Args:
        load: Returns nvidia-ml-py's module, or a fake of it.
        root: The folder that absolute paths start at.

    Returns:
        The GPUs. If the machine lacks them, or NVML, there is a reason and no error.
    """
    # They only tell what is missing where NVML is: WSL has a driver without them.
    signs = any((root / sign).exists() for sign in _DRIVER_SIGNS)
    try:
        nvml = load()
    except ImportError:
        return GpusFound(reason=_NOT_INSTALLED if signs else _NO_DRIVER)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if not signs and getattr(error, "value", None) == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return GpusFound(reason=_NO_DRIVER)
        return GpusFound(reason=f"NVML does not start: {error}{_hint(nvml, error)}")
    try:
        return _NvmlReader(nvml, root / "sys").read()
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def sm_counts(load: Callable[[], Any] = _pynvml) -> tuple[int, ...]:
    """Return the number of multiprocessors of every GPU that NVML shows, by index; 0 if unknown."""
    try:
        nvml = load()
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        found = []
        for index in range(_ask(nvml, nvml.nvmlDeviceGetCount) or 0):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            cores = handle and _ask(nvml, nvml.nvmlDeviceGetNumGpuCores, handle)
            capability = handle and _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
            few = capability and tuple(capability) in _SMS_OF_64
            found.append((cores or 0) // (64 if few else 128) if capability else 0)
        return tuple(found)
    finally:
        _ask(nvml, nvml.nvmlShutdown)


def _hint(nvml: Any, error: Exception) -> str:
    code = getattr(error, "value", None)
    if code == nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return " (the driver was updated: reboot, or load its new module)"
    if code == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return " (libnvidia-ml.so.1 belongs to the driver; in a container: enable utility)"
    if code == nvml.NVML_ERROR_NO_PERMISSION:
        return " (this user may not open /dev/nvidiactl)"
    return ""


def _ask(nvml: Any, function: Callable[..., Any], *arguments: object) -> Any:
    """Return the call's result, or None if NVML refuses it."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


class _NvmlReader:
    """Reads all GPUs while NVML is initialised."""

    def __init__(self, nvml: Any, sys: Path) -> None:
        self._nvml = nvml
        self._sys = sys

    def _ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        return _ask(self._nvml, function, *arguments)

    def read(self) -> GpusFound:
        nvml = self._nvml
        driver = _string(self._ask(nvml.nvmlSystemGetDriverVersion))
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return GpusFound(driver=driver, reason=f"NVML can't count the GPUs: {error}")
        if not count:
            return GpusFound(driver=driver, reason="the driver shows no GPU to this process")
        handles, gpus, lanes, missing = [], [], [], []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _string(nvml.nvmlDeviceGetUUID(handle))
            except nvml.NVMLError as error:
                missing.append(f"GPU {index}: {error}")
                continue
            gpu = self._gpu(handle, index, uuid)
            handles.append(handle)
            lanes.append(self._lanes(handle, gpu))
            gpus.append(replace(gpu, nvlinks=lanes[-1].total, nvlink_gb_per_s=lanes[-1].gb_per_s))
        found = tuple(
            replace(gpu, peers=self._peers(i, handles, gpus, lanes)) for i, gpu in enumerate(gpus)
        )
        return GpusFound(found, driver, "; ".join(missing))

    def _gpu(self, handle: Any, index: int, uuid: str) -> Gpu:
        nvml = self._nvml
        capability = self._ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        address = _pci_address(self._ask(nvml.nvmlDeviceGetPciInfo, handle))
        numa_node = self._sys / "bus/pci/devices" / address / "numa_node"
        return Gpu(
            uuid=uuid,
            index=index,
            name=_string(self._ask(nvml.nvmlDeviceGetName, handle)),
            compute_capability="" if capability is None else "{}.{}".format(*capability),
            memory_nbytes=0 if memory is None else memory.total,
            pci_address=address,
            # Not nvmlDeviceGetNumaNodeId: that is the node of the GPU's own memory, if it is one.
            numa_node=sysfs.number(numa_node, -1) if address else -1,
            pcie_generation=self._ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0,
            pcie_width=self._ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or 0,
        )

    def _lanes(self, handle: Any, gpu: Gpu) -> _Lanes:
        nvml, found, speeds = self._nvml, _Lanes({}, 0, 0.0), []
        to_switches = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask(nvml.nvmlDeviceGetNvLinkState, handle, link) != _ACTIVE:
                continue
            version = self._ask(nvml.nvmlDeviceGetNvLinkVersion, handle, link)
            speeds.append(_lane_gb_per_s(version, gpu.compute_capability))
            kind = self._ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            if kind == _REMOTE_IS_SWITCH:
                to_switches += 1
            else:
                far = _pci_address(self._ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link))
                found.to_gpus[far] = found.to_gpus.get(far, 0) + 1
        return found._replace(to_switches=to_switches, gb_per_s=min(speeds, default=0.0))

    def _peers(
        self, index: int, handles: Sequence[Any], gpus: Sequence[Gpu], lanes: Sequence[_Lanes]
    ) -> tuple[GpuPeer, ...]:
        found = []
        for other in range(len(handles)):
            if other == index:
                continue
            pair = (handles[index], handles[other])
            far = gpus[other].pci_address
            count = lanes[index].to_gpus.get(far, 0) if far else 0
            # Behind switches every lane of one GPU reaches the other, once the fabric is set up.
            if not count and self._p2p(*pair, _P2P_NVLINK):
                count = min(lanes[index].to_switches, lanes[other].to_switches)
            level = self._ask(self._nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
            found.append(
                GpuPeer(
                    gpus[other].uuid,
                    count,
                    self._p2p(*pair, _P2P_READ),
                    self._p2p(*pair, _P2P_WRITE),
                    "nvlink" if count else _RELATIONS.get(level, ""),
                )
            )
        return tuple(found)

    def _p2p(self, near: Any, far: Any, capability: int) -> bool:
        status = self._ask(self._nvml.nvmlDeviceGetP2PStatus, near, far, capability)
        return bool(status == _P2P_OK)


def _lane_gb_per_s(version: int | None, compute_capability: str) -> float:
    speed = _LANE_GB_PER_S.get(version or 0, 0.0)
    major = compute_capability.partition(".")[0]
    if major.isdigit() and int(major) < _BLACKWELL:
        speed = min(speed, _LANE_GB_PER_S[6])
    return speed


def _string(value: object) -> str:
    """Return a string of NVML's as str; older releases of nvidia-ml-py return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _pci_address(info: Any) -> str:
    """Return NVML's "00000000:3B:00.0" as sysfs writes it, "0000:3b:00.0"; "" if unknown."""
    text = _string(getattr(info, "busId", "")).lower()
    domain, colon, rest = text.partition(":")
    return domain[-4:].rjust(4, "0") + colon + rest if colon else ""
