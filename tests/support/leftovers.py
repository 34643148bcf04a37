"""What this process holds of the things that a test may leave behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

#: Tests look at what these log; "" is the root.
_LOGGERS = ("", "mx", "mx_transports", "grpc")


@dataclass(frozen=True)
class Holdings:
    """What this process holds of the things that a test may leave behind."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    mappings: frozenset[str]
    children: frozenset[int]
    levels: frozenset[tuple[str, int]]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            frozenset(t for t in threading.enumerate() if t.is_alive() and not _has_ended(t)),
            frozenset(_descriptors()),
            frozenset(_shared_mappings()),
            frozenset(_children()),
            frozenset((name, logging.getLogger(name).level) for name in _LOGGERS),
        )

    def beyond(self, before: Holdings) -> list[str]:
        """What `self` holds that `before` did not, a line each."""
        return [
            *(f"thread {t.name!r} (daemon={t.daemon})" for t in self.threads - before.threads),
            *(f"descriptor {n} -> {what}" for n, what in self.descriptors - before.descriptors),
            *(f"mapping {line}" for line in self.mappings - before.mappings),
            *(f"child process {pid}" for pid in self.children - before.children),
            *(f"level {n} of logger {name!r}" for name, n in self.levels - before.levels),
        ]


def _descriptors() -> Iterator[tuple[int, str]]:
    # The listing's own descriptor is in the listing, and gone when it is looked up.
    for name in os.listdir("/proc/self/fd"):
        try:
            yield int(name), os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue


def _shared_mappings() -> Iterator[str]:
    """Maps of memfds and of /dev/shm files: address range and name."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "/memfd:" in line or "/dev/shm/" in line:
                fields = line.split(maxsplit=5)
                yield f"{fields[0]} {fields[1]} {fields[5].strip()}"


def _children() -> Iterator[int]:
    # Most commands are children of the fork server, where one was imported.
    forkserver = sys.modules.get("tests.support.forkserver")
    parents = (os.getpid(), *(() if forkserver is None else forkserver.server_pids()))
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                stat = file.read()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command's name is in parentheses and may hold anything, parentheses included.
        if int(stat.rpartition(b")")[2].split()[1]) in parents:
            yield int(name)


def _has_ended(thread: threading.Thread) -> bool:
    """Return True for a thread that a library started, not Python, and that is no more: Python,
    which has learned of it when it logged, takes it to be alive for ever."""
    foreign = isinstance(thread, threading._DummyThread)
    return foreign and not os.path.exists(f"/proc/self/task/{thread.native_id}")
