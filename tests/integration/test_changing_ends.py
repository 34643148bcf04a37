"""How changes of lent tensors end where something fails, or an exception comes from a signal."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mx import api
from mx.errors import ClosedError, ConfigError, CoordinatorError, MxError
from tests.support.commands import Run, environment, start_coordinator
from tests.support.tensors import same

pytestmark = pytest.mark.integration

Weights = dict[str, torch.Tensor]

NBYTES = 1 << 16


def tensors(value: int) -> Weights:
    return {name: torch.full((NBYTES,), value, dtype=torch.uint8) for name in ("a", "b", "c")}


def pulled(coordinator: str, like: Weights, model: str = "m") -> Weights:
    own = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with api.pull(model, coordinator=coordinator, into=own) as pull:
        pull.wait(60)
    return own


@pytest.mark.parametrize(
    "change",
    [
        lambda lent: lent.update(b=torch.zeros(2, NBYTES // 2, dtype=torch.uint8)),
        lambda lent: lent.update(b=torch.zeros(NBYTES, dtype=torch.int8)),
        lambda lent: lent.update(b=lent["a"][: NBYTES // 2]),
        lambda lent: lent.pop("b"),
        lambda lent: lent["b"].untyped_storage().resize_(0),
        lambda lent: lent.update(b=torch.zeros(NBYTES, dtype=torch.uint8, device="meta")),
        lambda lent: lent.update(b="nonsense"),
    ],
    ids=["shape", "dtype", "size", "gone", "freed", "meta", "no tensor"],
)
def test_what_can_not_be_lent_any_more_is_raised_and_can_be_mended(
    coordinator: str, change: Callable[[Weights], object]
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with pytest.raises(MxError) as caught, source.changing():
            lent["a"].fill_(2)
            change(lent)
        assert "b" in str(caught.value) and str(caught.value) == source.withdrawn
        with pytest.raises(MxError):
            pulled(coordinator, tensors(0))
        lent["b"] = torch.full((NBYTES,), 3, dtype=torch.uint8)
        with source.changing(["c"]):
            lent["c"].fill_(4)
        assert not source.withdrawn
        assert same(pulled(coordinator, lent), lent)


def test_the_blocks_own_error_goes_out_where_the_tensors_can_not_be_lent_either(
    coordinator: str,
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with pytest.raises(ZeroDivisionError), source.changing():
            del lent["b"]
            raise ZeroDivisionError
        assert "b: no longer there" in source.withdrawn


def test_a_change_that_failed_and_is_repeated_lists_what_is_in_memory(coordinator: str) -> None:
    """The engine has pointed a tensor at memory that a pull fills, which can't be lent."""
    lent, own = tensors(1), tensors(0)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False) as source,
        api.serve(tensors(7), model="n", coordinator=coordinator),
    ):
        with api.pull("n", coordinator=coordinator, into=own) as pull:
            pull.wait(60)
            with contextlib.suppress(ConfigError), source.changing():
                lent["a"].fill_(2)
                lent["b"] = own["b"]
            assert "in use" in source.withdrawn
        with source.changing():  # as the error said: that one is closed
            pass
        assert not source.withdrawn
        assert bool((lent["b"] == 7).all())
        assert same(pulled(coordinator, lent), lent)


def test_memory_that_is_in_use_is_an_error(coordinator: str) -> None:
    lent, own = tensors(1), tensors(0)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False) as source,
        api.serve(tensors(7), model="n", coordinator=coordinator),
        api.pull("n", coordinator=coordinator, into=own) as pull,
    ):
        pull.wait(60)
        with (
            pytest.raises(ConfigError, match="in use: another pull or broadcast"),
            source.changing(),
        ):
            lent["b"] = own["b"]


def test_a_pull_inside_the_block_fills_the_tensors(coordinator: str) -> None:
    lent = tensors(1)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False) as source,
        api.serve(tensors(7), model="n", coordinator=coordinator),
    ):
        with pytest.raises(ConfigError, match="in use"):
            api.pull("n", coordinator=coordinator, into=lent).wait(60)
        with source.changing(), api.pull("n", coordinator=coordinator, into=lent) as pull:
            pull.wait(60)
        assert same(pulled(coordinator, lent), tensors(7))
        with pytest.raises(ConfigError, match="in use"), source.changing():
            pull = api.pull("n", coordinator=coordinator, into=lent)
            pull.wait(60)
        assert "in use: another pull" in source.withdrawn, "it may still write"
        pull.close()
        with source.changing():
            pass
        assert same(pulled(coordinator, lent), tensors(7))


def test_what_a_held_pull_replaces_one_of_is_lent_where_it_is(coordinator: str) -> None:
    """The other tensors are the pull's own, which no other may fill."""
    lent, own = tensors(1), tensors(0)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False),
        api.pull("m", coordinator=coordinator, into=own, hold=True) as pull,
    ):
        held = pull.hold()
        with held.changing():
            own["b"] = own["b"].clone()
        assert not held.withdrawn
        with api.pull("m", peer=held.endpoint, into=tensors(0)) as other:
            other.wait(60)
    # No claim is left.
    with api.serve(lent, model="n", coordinator=coordinator):
        for name, tensor in own.items():
            with api.pull("n", coordinator=coordinator, into=own) as pull:
                pull.wait(60)
            assert torch.equal(tensor, lent[name])


def test_a_coordinator_that_is_gone_is_an_error_and_the_next_change_lists_all(run: Run) -> None:
    address, process = start_coordinator(run)
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=address, copy=False) as source:
        with pytest.raises(CoordinatorError), source.changing(["a"]):
            process.end()
            lent["a"].fill_(2)
        assert source.withdrawn
        start_coordinator(run, port=int(address.rpartition(":")[2]))
        with source.changing(["b"]):
            lent["b"].fill_(3)
        assert not source.withdrawn
        assert same(pulled(address, lent), lent)


def test_a_change_that_is_dropped_is_withdrawn(coordinator: str) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        change = source.changing()
        change.__enter__()
        lent["a"].fill_(2)
        with pytest.raises(ConfigError, match="changing already"), source.changing():
            pass
        del change
        gc.collect()
        with source.changing():  # waits for the end of that one
            pass
        assert not source.withdrawn
        assert same(pulled(coordinator, lent), lent)


def test_a_source_that_another_thread_closes_ends_every_wait(coordinator: str) -> None:
    lent = tensors(1)
    source = api.serve(lent, model="m", coordinator=coordinator, copy=False)
    inside, found = threading.Event(), list[object]()
    closed = threading.Event()

    def change() -> None:
        try:
            with source.changing():
                inside.set()
                closed.wait()
                lent["a"].fill_(2)
            found.append(None)
        except BaseException as error:  # noqa: BLE001 - is looked at below
            found.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    inside.wait()
    source.close()
    closed.set()
    thread.join()
    assert found == [None]  # there is nothing to list again
    with pytest.raises(ClosedError), source.changing():
        pass


def test_a_child_that_is_forked_inside_leaves_its_parents_change_alone(coordinator: str) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        child = 1
        with source.changing():
            lent["a"].fill_(2)
            child = os.fork()
        if not child:
            os._exit(17)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert not source.withdrawn
        assert same(pulled(coordinator, lent), lent)


#: Lends a tensor, and interrupts 200 of its changes, each at another point. Prints what became of
#: each, goes on when it is answered, and does so again when it has made a change to the end.
INTERRUPTED = """
import json, random, signal, sys, time, torch
from mx import api
from mx.errors import MxError
coordinator, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chosen = random.Random(seed)
p = torch.zeros(1 << 16, dtype=torch.int32)
source = api.serve(dict(p=p), model="m", coordinator=coordinator, copy=False)
class Alarm(BaseException):
    pass
def raising(*_):
    raise Alarm
def say(**what):
    print(json.dumps(what), flush=True)
    assert sys.stdin.readline()
def listed():
    try:
        found = api.list_sources("m", coordinator=coordinator)
    except MxError:
        return False
    return any(each.record.endpoint == source.endpoint for each in found)
def change():
    began_s = time.monotonic()
    with source.changing():
        p.add_(1)
    return time.monotonic() - began_s
change()
long_s = 1.2 * max(change() for _ in range(5))
signal.signal(signal.SIGALRM, raising)
kept = []
for number in range(rounds):
    part = number / rounds if number % 2 else chosen.random()
    hit = False
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-6 + part * long_s)
            while True:
                with source.changing():
                    p.add_(1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        hit = True
    why, until_s = source.withdrawn, time.monotonic() + 20
    while not (why or listed()) and time.monotonic() < until_s:
        why = source.withdrawn
    say(number=number, hit=hit, ended="withdrawn" if why else "lent" if listed() else "neither",
        value=int(p[0]))
    try:
        change()
        say(number=number, ended="changed", value=int(p[0]))
    except MxError as error:
        say(number=number, ended=str(error), value=int(p[0]))
        break
source.close()
"""


@pytest.mark.long
@pytest.mark.timeout(360)
def test_an_exception_from_a_signal_leaves_the_tensors_lent_or_withdrawn(coordinator: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, coordinator, "200", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None and process.stdin is not None
    ended: dict[str, int] = {}
    try:
        for line in process.stdout:
            said: dict[str, Any] = json.loads(line)
            assert said["ended"] in ("lent", "withdrawn", "changed"), said
            ended[said["ended"]] = ended.get(said["ended"], 0) + 1
            if said["ended"] != "withdrawn":
                like = {"p": torch.full((1 << 16,), said["value"], dtype=torch.int32)}
                try:
                    found = pulled(coordinator, like)
                except MxError as error:
                    raise AssertionError(f"{said}, and {error}") from error
                assert same(found, like), said
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert ended["changed"] == 200 and ended["lent"] and ended["withdrawn"]
