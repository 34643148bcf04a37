"""What a broadcast makes of a process group's collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mx.fleet.process_group import CollectiveStep, ProcessGroup


class Late:
    """A collective whose end is known before the callbacks that were added earlier are called.

    torch's futures are such for a moment: they are marked as done first, call a callback that is
    added from then on at once, and those that they have on another thread.
    """

    def __init__(self) -> None:
        self.earlier: list[Callable[[Late], None]] = []
        self.done = False

    def get_future(self) -> Late:
        return self

    def add_done_callback(self, tell: Callable[[Late], None]) -> None:
        if self.done:
            tell(self)
        else:
            self.earlier.append(tell)

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None: ...


def test_memory_comes_back_from_steps_whose_end_is_known_early() -> None:
    group = ProcessGroup.__new__(ProcessGroup)
    works = [Late() for _ in range(3)]
    group._steps = [CollectiveStep(work, torch.device("cpu")) for work in works]
    told: list[str] = []
    for work in works:
        group.after_all(lambda: told.append("early"))
        work.done = True
    group.after_all(lambda: told.append("now"))
    assert told == ["now"]
    assert all(step.ended for step in group._steps)
    for work in works:
        for tell in work.earlier:
            tell(work)
    assert told == ["now", "early", "early", "early"]
