"""nvidia-ml-py's module as far as mx.hardware.gpus uses it, over GPUs that a test describes.

The real module is installed with the tests: `test_hardware_gpus` holds the names against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml


@dataclass
class Card:
    """`links` are NVLink lanes by number: (active, version, other end), which is "switch" or a
    card's number. `p2p` says, by the other card's number, which of read, write and NVLink work;
    `level` the common ancestor with it. A name in `fails` raises that NVML error instead."""

    uuid: str
    bus_id: str
    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    memory_nbytes: int = 85_520_809_984
    generation: int = 5
    width: int = 16
    links: dict[int, tuple[bool, int, str | int]] = field(default_factory=dict)
    p2p: dict[int, str] = field(default_factory=dict)  # of the letters r, w, n
    level: dict[int, int] = field(default_factory=dict)
    fails: dict[str, int] = field(default_factory=dict)


def nvswitch_host(count: int = 8, lanes: int = 18) -> list[Card]:
    """Return a host whose GPUs are all behind switches."""
    others = [{j for j in range(count) if j != i} for i in range(count)]
    return [
        Card(
            f"GPU-{i:08x}-1234-5678-9abc-def012345678",
            f"00000000:{0x19 + i:02X}:00.0",
            links={lane: (True, 6, "switch") for lane in range(lanes)},
            p2p=dict.fromkeys(others[i], "rwn"),
            level={j: 30 if i // 4 == j // 4 else 50 for j in others[i]},
        )
        for i in range(count)
    ]


def error(code: int) -> Exception:
    made: Exception = pynvml.NVMLError(code)
    return made


class FakeNvml:
    """Stands for the module. `init_fails` is an NVML error's number."""

    NVMLError = pynvml.NVMLError
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    NVML_ERROR_LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    NVML_ERROR_NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION

    def __init__(self, cards: list[Card], *, init_fails: int = 0, driver: str = "580.95.05"):
        self.cards, self.driver, self._init_fails = cards, driver, init_fails
        self.users = 0

    def nvmlInit(self) -> None:
        if self._init_fails:
            raise error(self._init_fails)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._check(index, "HandleByIndex")
        return index

    def _check(self, handle: int, what: str) -> Card:
        assert self.users
        card = self.cards[handle]
        if what in card.fails:
            raise error(card.fails[what])
        return card

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the getters of one device, which return what the card says."""
        getters: dict[str, Callable[[Card], Any]] = {
            "UUID": lambda card: card.uuid,
            "Name": lambda card: card.name,
            "CudaComputeCapability": lambda card: card.capability,
            "MemoryInfo": lambda card: SimpleNamespace(total=card.memory_nbytes),
            "PciInfo": lambda card: SimpleNamespace(busId=card.bus_id),
            "MaxPcieLinkGeneration": lambda card: card.generation,
            "MaxPcieLinkWidth": lambda card: card.width,
        }
        what = name.removeprefix("nvmlDeviceGet")
        if what not in getters:
            raise AttributeError(name)
        return lambda handle: getters[what](self._check(handle, what))

    def _link(self, handle: int, link: int, what: str) -> tuple[bool, int, str | int]:
        card = self._check(handle, what)
        if link not in card.links:
            raise error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return card.links[link]

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int(self._link(handle, link, "NvLinkState")[0])

    def nvmlDeviceGetNvLinkVersion(self, handle: int, link: int) -> int:
        return self._link(handle, link, "NvLinkVersion")[1]

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2 if self._link(handle, link, "NvLinkRemoteDeviceType")[2] == "switch" else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        far = self._link(handle, link, "NvLinkRemotePciInfo")[2]
        assert isinstance(far, int)
        return SimpleNamespace(busId=self.cards[far].bus_id)

    def nvmlDeviceGetP2PStatus(self, handle: int, other: int, capability: int) -> int:
        assert type(capability) is int  # nvidia-ml-py has a tuple among its constants
        card = self._check(handle, "P2PStatus")
        return 0 if "rwn"[capability] in card.p2p.get(other, "") else 1

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: int, other: int) -> int:
        return self._check(handle, "TopologyCommonAncestor").level[other]
