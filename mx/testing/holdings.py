"""What a process holds that a session or an exposure may leave behind."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

_MOMENT_S = 0.05


@dataclass(frozen=True)
class HeldResources:
    """Kernel threads by id, descriptors by number and target, maps of memfds and /dev/shm, and
    Python's threads by id and name."""

    threads: frozenset[str]
    descriptors: frozenset[tuple[str, str]]
    mappings: frozenset[str]
    python_threads: frozenset[str]

    @classmethod
    def now(cls) -> HeldResources:
        descriptors = set()
        for number in os.listdir("/proc/self/fd"):
            # The listing's own descriptor is gone by now.
            with contextlib.suppress(FileNotFoundError):
                descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        return cls(
            frozenset(os.listdir("/proc/self/task")),
            frozenset(descriptors),
            frozenset(
                f"{line.split()[0]} {line.split(maxsplit=5)[5]}"
                for line in maps.splitlines()
                if "/memfd:" in line or "/dev/shm/" in line
            ),
            frozenset(f"{thread.ident} {thread.name}" for thread in threading.enumerate()),
        )

    @classmethod
    def after_join(cls) -> HeldResources:
        """Return what is held now, without threads of the kernel that are gone in a moment: it
        takes that long to be rid of a thread that has been joined."""
        found = cls.now()
        time.sleep(_MOMENT_S)
        return replace(found, threads=found.threads & cls.now().threads)

    def beyond(self, before: HeldResources) -> list[str]:
        """Return what `self` has and `before` had not, a line each."""
        return [
            *(f"thread {tid}" for tid in sorted(self.threads - before.threads)),
            *(f"descriptor {n} -> {to}" for n, to in sorted(self.descriptors - before.descriptors)),
            *(f"mapping {line}" for line in sorted(self.mappings - before.mappings)),
            *(f"thread {name}" for name in sorted(self.python_threads - before.python_threads)),
        ]
