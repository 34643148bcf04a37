"""A process whose calls of mx are interrupted by exceptions that a signal's handler raises.

Standard input has what to do as JSON; what was counted comes on standard output as JSON. Of the
calls that return, what they return is closed; of the others nothing is at hand.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mx import api

SETTLE_S = 15.0
#: How long a loop without users may go on, on a machine that is busy.
LINGER_S = 5.0


class Interrupts:
    """Raises an exception in the main thread, once, some time after `armed` began."""

    def __init__(self) -> None:
        self.raised = 0
        self._armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_: Any) -> None:
        if self._armed:
            self._armed = False
            self.raised += 1
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def armed(self, after_s: float) -> Iterator[None]:
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, after_s)
            yield
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)


def held() -> dict[str, int]:
    """What this process has that could be left over."""
    memfds = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [each[0].split("-") for each in memfds if each[5:] and each[5].startswith("/memfd:mx")]
    threads = threading.enumerate()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memfd_bytes": sum(int(end, 16) - int(begin, 16) for begin, end in spans),
        "threads": len(threads),
    }


def open_now() -> list[str]:
    """What each descriptor of this process is, for the message of a failure."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(f"{each.name}: {os.readlink(each)}")
    return found


def at_most(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(now[name] <= before[name] for name in before)


def counted(listed: Callable[[], int]) -> dict[str, int]:
    """Return what is held and listed, once the loop has ended for want of users, or after a while
    all the same: it has descriptors of its own."""
    there = listed()
    until_s = time.monotonic() + LINGER_S
    while "mx-loop" in [each.name for each in threading.enumerate()]:
        if time.monotonic() > until_s:
            break
        time.sleep(0.05)
    gc.collect()
    return held() | {"listed": there}


def settled(before: dict[str, int], listed: Callable[[], int]) -> dict[str, int]:
    """Return what is held once it is no more than before, or after a while all the same."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        now = counted(listed)
        if at_most(now, before) or time.monotonic() > until_s:
            return now


class Calls:
    """The calls that are interrupted. Each returns what the caller has to close."""

    def __init__(self, coordinator: str, checkpoint: str) -> None:
        self._at: dict[str, Any] = {"coordinator": coordinator}
        self._checkpoint = checkpoint
        self._number = 0
        self._tensors = {"weight": torch.arange(1 << 20, dtype=torch.uint8)}
        self._other = {"weight": torch.ones(1 << 20, dtype=torch.uint8)}

    def fresh(self) -> str:
        self._number += 1
        return f"n{os.getpid()}-{self._number}"

    def pull(self) -> Any:
        self._number += 1
        hold, attach = self._number % 3 == 0, self._number % 3 == 1
        return api.pull("m", hold=hold, attach=attach, **self._at)

    def load(self) -> None:
        api.load("m", attach=bool(random.getrandbits(1)), **self._at)

    def serve(self) -> Any:
        return api.serve(self._checkpoint, model=self.fresh(), **self._at)

    def lend(self) -> Any:
        return api.serve(self._tensors, model=self.fresh(), copy=False, **self._at)

    def router(self) -> Any:
        return api.Router(self._at["coordinator"])

    def listing(self) -> None:
        api.list_sources("m", **self._at)

    def plan(self) -> None:
        api.plan("m", **self._at)

    def observer(self) -> Any:
        return api.Observer(**self._at)

    def watch(self) -> _Within:
        """Return a call of its own: the router is there before the timer begins."""
        router = api.Router(self._at["coordinator"])
        return _Within(router, lambda: router.watch("m"))

    def hold(self) -> _Within:
        pull = api.pull("m", hold=True, **self._at)
        pull.wait()
        return _Within(pull, pull.hold)

    def update(self) -> _Within:
        source = api.serve(self._tensors, model=self.fresh(), **self._at)
        return _Within(source, lambda: _nothing(source.update(self._other, grace_s=0.0)))


def _nothing(_: object) -> None:
    """Drop a result that needs no close."""


class _Within:
    """A call of something that is there before, and that is closed after it. What the call returns
    is closed, too."""

    def __init__(self, owner: Any, call: Callable[[], Any]) -> None:
        self._owner = owner
        self._call = call

    def __call__(self) -> Any:
        return self._call()

    def close(self) -> None:
        self._owner.close()


def interrupt(interrupts: Interrupts, call: Callable[[], Any], rounds: int, prepared: bool) -> int:
    """Call and interrupt, at delays that grow step by step, and at random ones. Returns how often
    an exception came out of a call."""
    usual_s, out = _usual_s(call, prepared), 0
    for number in range(rounds):
        share = number / rounds if number % 2 else random.random()
        within = call() if prepared else None
        made = None
        try:
            with interrupts.armed(1e-5 + share * usual_s * 1.2):
                made = within() if within is not None else call()
        except KeyboardInterrupt:
            out += 1
        except Exception as error:  # noqa: BLE001 - what is left over counts, whatever comes
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        for each in (made, within):
            if each is not None:
                each.close()
    return out


def _usual_s(call: Callable[[], Any], prepared: bool) -> float:
    took_s = []
    for _ in range(5):
        work = call() if prepared else None
        began_s = time.monotonic()
        made = work() if work is not None else call()
        took_s.append(time.monotonic() - began_s)
        for each in (made, work):
            if each is not None:
                each.close()
    return sorted(took_s)[2]


def main() -> None:
    what = json.load(sys.stdin)
    coordinator, checkpoint = what["coordinator"], what["checkpoint"]
    calls = Calls(coordinator, checkpoint)
    call = getattr(calls, what["call"])
    prepared = what["call"] in ("hold", "update", "watch")

    def listed() -> int:
        router = api.Router(coordinator)
        with router:
            return len(router.sources()) + len(router.replicas())

    # One of each first: what stays for good is there before anything is counted.
    for each in ("pull", "serve", what["call"]):
        interrupt(Interrupts(), getattr(calls, each), 0, each in ("hold", "update", "watch"))
    before = counted(listed)
    interrupts = Interrupts()
    opened_before = open_now()
    out = interrupt(interrupts, call, what["rounds"], prepared)
    after = settled(before, listed)
    opened = {"opened_before": opened_before, "opened_after": open_now()}
    expected = load_file(checkpoint)
    with api.pull("m", coordinator=coordinator) as pull:
        got = pull.state_dict()
        right = got.keys() == expected.keys() and all(
            torch.equal(got[name].view(torch.uint8), expected[name].view(torch.uint8))
            for name in expected  # as bytes: some are not numbers
        )
    found = {"before": before, "after": after, "interrupted": out, "right": right}
    json.dump(found | opened, sys.stdout)


if __name__ == "__main__":
    main()
