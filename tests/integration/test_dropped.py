"""Objects that are dropped without `close`: they warn if they still work, and are closed."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # its first import keeps frames for the collector: here none of a pull

from mx import api, runtime
from mx.errors import ClosedError
from tests.support.commands import environment

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("uncollected"),
]

WITHIN_S = 30.0
#: How many the checkpoint has.
LAYERS = 10


def becomes(true: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + WITHIN_S
    while not true():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def is_listed(coordinator: str, model: str) -> bool:
    with api.Router(coordinator) as router:
        return bool(router.sources(model))


def loop_is_free() -> bool:
    """Return True if nothing uses the loop."""
    current = runtime._current
    return current is None or not current.users


def test_a_pull_that_is_dropped_unfinished_warns_and_is_closed(served: str) -> None:
    pull = api.pull("slow", coordinator=served, transport="tcp")
    next(pull.layers())
    with pytest.warns(ResourceWarning, match="`with`"):
        del pull
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_collector_may_drop_a_pull_on_a_thread_that_holds_its_locks(served: str) -> None:
    cycle: list[object] = []
    pull = api.pull("slow", coordinator=served, transport="tcp")
    next(pull.layers())
    cycle += [pull, cycle]
    transfer = pull._job._attempt._transfer  # type: ignore[union-attr]
    dropped, collected = weakref.ref(pull), threading.Event()

    def collect(machine: object) -> tuple[()]:
        gc.collect()
        collected.set()
        return ()

    del pull, cycle
    threading.Thread(target=transfer.react, args=(collect,), daemon=True).start()
    assert collected.wait(WITHIN_S)
    assert becomes(lambda: dropped() is None)
    assert becomes(loop_is_free)


def test_a_source_that_is_dropped_warns_and_is_closed(served: str, checkpoint: Path) -> None:
    source = api.serve(checkpoint, model="dropped", coordinator=served)
    assert is_listed(served, "dropped")
    with pytest.warns(ResourceWarning, match="<Source dropped"):
        del source
    assert becomes(lambda: not is_listed(served, "dropped"))
    assert becomes(loop_is_free)


def test_a_router_that_is_dropped_warns_and_is_closed(served: str) -> None:
    router = api.Router(served)
    assert router.sources("m")
    with pytest.warns(ResourceWarning, match="Router"):
        del router
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_router_that_is_dropped_with_its_watches_is_closed(served: str) -> None:
    router = api.Router(served)
    watches = [router.watch("m"), router.watch()]
    assert watches[0].next(WITHIN_S)
    gone = [weakref.ref(each) for each in (router, *watches)]
    del router, watches
    assert becomes(lambda: not any(each() for each in gone))
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_router_whose_drop_a_signal_interrupts_is_closed(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_over = api.Router._hand_over
    interrupted: list[bool] = []

    def interrupt_once(self: api.Router) -> None:
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        hand_over(self)

    router = api.Router(served)
    assert router.sources("m")
    monkeypatch.setattr(api.Router, "_hand_over", interrupt_once)
    del router
    assert interrupted
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_router_that_is_closed_ends_the_stream_of_a_watch_that_was_never_closed(
    served: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = api.Router(served)
    watch = router.watch("m")
    assert watch.next(WITHIN_S)
    task = watch._stream._task
    with monkeypatch.context() as patched:
        patched.setattr(type(watch), "_hand_over", lambda self: None)
        loop = watch._loop
        del watch
    router.close()
    assert task.done()
    runtime.release(loop)  # for the watch
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_watch_keeps_its_router_and_a_router_no_watch(served: str) -> None:
    watch = api.Router(served).watch("m")
    while (event := watch.next(WITHIN_S)) is not None and event.kind is not api.EventKind.SYNCED:
        pass
    assert event
    del watch
    assert becomes(loop_is_free)


def test_a_finished_pull_that_is_dropped_is_closed_without_a_word(served: str) -> None:
    tensors = api.pull("m", coordinator=served, attach=False).state_dict()
    assert becomes(loop_is_free)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_a_finished_pull_that_wrote_what_it_attached_to_leaves_no_descriptor(
    served: str, tmp_path: Path
) -> None:
    def memfds() -> int:
        return sum(memfd(int(number)) for number in os.listdir("/proc/self/fd"))

    before = memfds()
    api.pull("m", coordinator=served, out=tmp_path / "out").wait(60)
    assert becomes(lambda: memfds() <= before)


def test_a_finished_pull_whose_callback_refers_to_it_is_closed(served: str) -> None:
    pull = api.pull("m", coordinator=served, attach=False)
    pull.on_layer(lambda event, pull=pull: pull.progress())  # type: ignore[misc]
    pull.wait(60)
    dropped = weakref.ref(pull)
    del pull
    assert becomes(lambda: dropped() is None)
    assert becomes(loop_is_free)


def test_a_pull_all_of_whose_layers_were_taken_is_closed_without_a_word(served: str) -> None:
    """It may be about to end."""
    pull = api.pull("m", coordinator=served, transport="tcp")
    ready, go_on, here = list[int](), threading.Event(), threading.current_thread()

    def wait_at_the_last(event: api.LayerEvent) -> None:
        ready.append(event.index)
        if len(ready) == LAYERS and threading.current_thread() is not here:
            go_on.wait(WITHIN_S)

    pull.on_layer(wait_at_the_last)
    assert len(list(pull.layers())) == LAYERS
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del pull
    go_on.set()
    assert not said
    assert becomes(loop_is_free)


def test_a_finished_pull_that_others_may_read_warns(served: str) -> None:
    pull = api.pull("m", coordinator=served, hold=True)
    pull.wait(60)
    with pytest.warns(ResourceWarning, match="`with`"):
        del pull
    assert becomes(loop_is_free)


def test_a_held_source_goes_on_when_its_pull_is_dropped(served: str) -> None:
    source = api.pull("m", coordinator=served, hold=True).hold()
    with api.pull("m", peer=source.endpoint) as other:
        other.wait(60)
    source.close()
    assert becomes(loop_is_free)


def test_a_held_source_that_is_dropped_after_its_pull_warns(served: str) -> None:
    source = api.pull("m", coordinator=served, hold=True).hold()
    with pytest.warns(ResourceWarning, match="<Source m"):
        del source
    assert becomes(loop_is_free)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("options", [{"attach": False}, {"attach": True}, {"hold": True}, {"into"}])
def test_the_memory_of_a_dropped_pull_goes_without_the_collector(
    served: str, options: dict[str, bool] | set[str]
) -> None:
    with api.pull("m", coordinator=served) as first:
        expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    like = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    given = options if isinstance(options, dict) else {"into": like}
    pull = api.pull("m", coordinator=served, **given)
    tensors, event = pull.state_dict(), next(pull.layers())
    parts = [weakref.ref(part) for part in (pull, pull._job, pull._state, pull._job.edition)]
    view = pull.memory()
    memory = weakref.ref(view.obj) if isinstance(view, memoryview) else None
    arena = pull._job.edition.arena
    descriptor = None if arena is None else arena.memfd
    del pull, view, arena
    assert becomes(lambda: not any(part() for part in parts))
    assert becomes(loop_is_free)
    assert descriptor is None or not memfd(descriptor)
    with pytest.raises(ClosedError):
        event.tensors()
    for name, tensor in tensors.items():
        assert torch.equal(octets(tensor), octets(expected[name])), name
    del tensor, tensors
    assert memory is None or memory() is None


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def memfd(number: int) -> bool:
    """Return True if this descriptor is a memory file."""
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:")
    except FileNotFoundError:
        return False


def test_a_finished_pull_has_no_task(served: str) -> None:
    pull = api.pull("m", coordinator=served, attach=False)
    pull.wait(60)
    loop = pull._loop.loop
    assert becomes(
        lambda: not [task for task in asyncio.all_tasks(loop) if "mx-" in task.get_name()]
    )
    pull.close()


def test_an_awaited_pull_lives_until_its_end(served: str) -> None:
    async def pulled() -> api.PullReport:
        return await api.pull("m", coordinator=served, attach=False)

    report = asyncio.run(pulled())
    assert report.bytes
    assert becomes(loop_is_free)


FINISHED = """
import asyncio, gc, os, sys, time
import mx

gc.disable()

def held():
    # bytes of memory of its own and shared with others, and descriptors
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(line[1]) << 10 for line in lines), len(os.listdir("/proc/self/fd"))

def pulled(number):
    if number % 2:
        mx.pull("m", coordinator=sys.argv[1], attach=False).wait()
        return
    async def awaited():
        report = await mx.pull("m", coordinator=sys.argv[1], attach=False)
    asyncio.run(awaited())

pulled(0), pulled(1)
nbytes = mx.pull("m", coordinator=sys.argv[1], attach=False).wait().bytes
time.sleep(1)  # what the first ones leave for good, such as gRPC's threads
began = held()
for number in range(8):
    pulled(number)
deadline_s = time.monotonic() + 20
more = began
while time.monotonic() < deadline_s:
    more = [now - before for now, before in zip(held(), began)]
    if more[0] < nbytes / 2 and more[1] <= 0:
        break
    time.sleep(0.05)
last = mx.pull("m", coordinator=sys.argv[1], attach=False)
last.wait()  # and is there until the end
print("more than at first:", more[0] // nbytes, "models,", more[1], "descriptors")
"""


def test_finished_pulls_that_are_never_closed_leave_nothing(served: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "always", "-c", FINISHED, served],
        check=False,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "more than at first: 0 models, 0 descriptors\n"
