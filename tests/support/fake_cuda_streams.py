"""The streams of fake GPUs: queues whose work is done when a thread waits for it, not before.

A real stream runs while the host goes on. This one runs as late as it may, so that code which
does not wait where it must reads, or sends, wrong bytes every time and not once in a thousand.
Single-threaded: the fake driver calls it under its lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Does its work and says so, or says that it has to wait.
Step = Callable[[], bool]


@dataclass
class FakeEvent:
    """`recorded` counts the records, `happened` those that the streams have come to."""

    ordinal: int
    recorded: int = 0
    happened: int = 0
    stream: FakeStream | None = None

    def has(self, count: int) -> bool:
        return self.happened >= count


@dataclass
class FakeStream:
    ordinal: int
    steps: deque[Step] = field(default_factory=deque)
    #: In the middle of a step: a collection there may free something, which drains the streams.
    busy: bool = False

    def advance(self) -> bool:
        """Do one step. Return False if there is none, or it can't be done yet."""
        if self.busy or not self.steps:
            return False
        self.busy = True
        try:
            done = self.steps[0]()
        finally:
            self.busy = False
        if done:
            self.steps.popleft()
        return done

    def run(self) -> bool:
        """Do all steps that can be done now. Return True if none is left."""
        while self.advance():
            pass
        return not self.steps

    def run_one(self) -> bool:
        """Do one step, if it can be done. Return True if none is left."""
        self.advance()
        return not self.steps

    def record(self, event: FakeEvent) -> None:
        event.recorded += 1
        event.stream = self
        count = event.recorded

        def step() -> bool:
            event.happened = max(event.happened, count)
            return True

        self.steps.append(step)

    def wait(self, event: FakeEvent) -> None:
        """Wait for the event's last record so far; the other stream is made to run for it."""
        count, other = event.recorded, event.stream

        def step() -> bool:
            while not event.has(count):
                if other is None or not other.advance():
                    return False
            return True

        self.steps.append(step)
