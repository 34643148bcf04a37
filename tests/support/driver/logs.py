"""The stand-in's logs: the calls that processes made, and what they took and did not give back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_HANDLES = ("cuMemCreate", "cuMemImportFromShareableHandle", "cuMemRetainAllocationHandle")
#: Calls that give something back, and those that took it.
PAIRS = {
    "cuMemRelease": _HANDLES,
    "cuMemUnmap": ("cuMemMap",),
    "cuMemAddressFree": ("cuMemAddressReserve",),
    "cuMemFree": ("cuMemAlloc",),
    "cuIpcCloseMemHandle": ("cuIpcOpenMemHandle",),
    "cuMemFreeHost": ("cuMemHostAlloc",),
    "cuMemHostUnregister": ("cuMemHostRegister",),
    "cuStreamDestroy": ("cuStreamCreate",),
    "cuEventDestroy": ("cuEventCreate",),
    "cuGraphDestroy": ("cuGraphCreate", "cuGraphClone", "cuStreamEndCapture"),
    "cuGraphExecDestroy": ("cuGraphInstantiateWithFlags",),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRetain",),
    "cuFileHandleDeregister": ("cuFileHandleRegister",),
    "cuFileBufDeregister": ("cuFileBufRegister",),
}


def parsed(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return the calls in lines of a log, in order, as names and results."""
    return [
        (line.split(" ", 1)[1].split("(")[0], line.rsplit(" ", 1)[1])
        for line in lines
        if not line.startswith("#")
    ]


def calls(folder: Path, process: int | None = None) -> list[tuple[str, str]]:
    """Return the calls in the logs of a folder, in order, as names and results.

    Args:
        folder: The folder that the setting LOG named.
        process: The only process to return calls of.
    """
    logs = sorted(folder.glob("*.log" if process is None else f"{process}.log"))
    return parsed(line for log in logs for line in log.read_text().splitlines())


def copied(folder: Path, call: str) -> int:
    """Return how many bytes processes copied by a call of the driver.

    Args:
        folder: The folder of their logs.
        call: The call: cuMemcpyDtoHAsync and its like.
    """
    log = "".join(each.read_text() for each in folder.glob("*.log"))
    copies = re.findall(rf"{call}\(\S+, \S+, (\d+), \S+\) CUDA_SUCCESS", log)
    return sum(map(int, copies))


def kept(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return what calls took and did not give back, or the other way round: "cuMemFree: 1 of 2"."""
    count = Counter(name for name, result in found if result == "CUDA_SUCCESS")
    taken = {back: sum(count[name] for name in takers) for back, takers in PAIRS.items()}
    return [f"{back}: {count[back]} of {n}" for back, n in taken.items() if count[back] != n]


class OwnLog:
    """The log of this process, from now on."""

    def __init__(self, folder: Path, process: int) -> None:
        self._path = folder / f"{process}.log"
        self._from = self._path.stat().st_size if self._path.exists() else 0

    def calls(self) -> list[tuple[str, str]]:
        """Return the calls since this object was made."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._from)
            return parsed(file.read().decode().splitlines())
