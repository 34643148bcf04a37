"""Where the time of reading from stores goes, by drive: what each thread does at a time is in one
stage, so that the stages of a thread add up to its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from mx.storage.mounts import drive_of

STAGES = OPEN, READ, PLACE, HASH, UPLOAD, WAIT = "open", "read", "place", "hash", "upload", "wait"

#: A drive's number (st_dev), or the name of a place.
Drive = int | str


class StageClock:
    """The time of one thread, by drive and stage. `drive` is where the next ones belong; `waited_s`
    are the seconds of reads, until its user clears it."""

    def __init__(self, drive: Drive = "") -> None:
        self.drive = drive
        self.spent: dict[tuple[Drive, str], tuple[float, int]] = {}
        self.at_s, self.waited_s = time.monotonic(), 0.0

    def lap(self, stage: str, nbytes: int = 0) -> None:
        """Count the time since the last lap, and these bytes, to a stage."""
        before_s, self.at_s = self.at_s, time.monotonic()
        seconds, key = self.at_s - before_s, (self.drive, stage)
        known_s, known_nbytes = self.spent.get(key, (0.0, 0))
        self.spent[key] = known_s + seconds, known_nbytes + nbytes
        self.waited_s += seconds if stage == READ else 0.0


class Stages:
    """The times of all threads that read for one pull. Thread-safe."""

    def __init__(self) -> None:
        self.mine = threading.local()  # has this thread's `clock`
        self._clocks: list[StageClock] = []  # of those that have ended

    @contextmanager
    def clock(self, drive: Drive = "", rest: str = WAIT) -> Iterator[StageClock]:
        """Give this thread a clock for the length of the block; `rest` is the stage at its end."""
        self.mine.clock = clock = StageClock(drive)
        try:
            yield clock
        finally:
            clock.lap(rest)
            self._clocks.append(clock)

    def report(self) -> list[tuple[str, str, float, int]]:
        """Return drive, stage, seconds and bytes of what was spent so far, in that order."""
        spent: dict[tuple[Drive, str], tuple[float, int]] = {}
        for clock in [*self._clocks]:
            for key, (seconds, nbytes) in clock.spent.items():
                known_s, known_nbytes = spent.get(key, (0.0, 0))
                spent[key] = known_s + seconds, known_nbytes + nbytes
        found = [
            (drive_of(drive) if isinstance(drive, int) else drive, stage, round(s, 6), nbytes)
            for (drive, stage), (s, nbytes) in spent.items()
        ]
        return sorted(found, key=lambda each: (each[0], STAGES.index(each[1])))
