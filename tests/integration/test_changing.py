"""Lent tensors that their owner changes: readers get one revision each, whole, or a typed error."""

from __future__ import annotations

import _thread
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from mx import api
from mx.core.lending import Lent
from mx.errors import (
    BindingError,
    ClosedError,
    ConfigError,
    IncompleteError,
    MxError,
    RevisionChangedError,
    StaleGenerationError,
    SupersededError,
)
from mx.units import MIB
from tests.integration.scripts import ran
from tests.support import forkserver
from tests.support.commands import Run, environment, start_coordinator
from tests.support.outcomes import error_of, until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("torch_is_forked")]

LAYERS = 8

#: Fills tensors of its own in so many threads, again and again until its standard input is closed,
#: and prints which versions each pull ended with, or its error. "stop": stops in the middle of the
#: first pull, and says so.
READER = f"""
import json, sys, threading, torch
from mx import api
from mx.errors import MxError
coordinator, threads, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ended, go_on = threading.Event(), threading.Event()
def until_closed():
    sys.stdin.read()
    ended.set()
    go_on.set()
threading.Thread(target=until_closed, daemon=True).start()
def say(what):
    sys.stdout.write(json.dumps(what) + chr(10))
    sys.stdout.flush()
def stop(event):
    say(dict(layer=event.name, revision=event.revision))
    go_on.wait()
def read():
    names = ["model.layers.%d.mlp.weight" % i for i in range({LAYERS})]
    own = dict((name, torch.zeros({2 * MIB}, dtype=torch.uint8)) for name in names)
    last = False
    while not last:
        last = ended.is_set() or how == "stop"
        follow = how != "stop"
        options = dict(follow=follow, wait_s=20 if follow else 0)
        with api.pull("m", coordinator=coordinator, into=own, **options) as pull:
            if how == "stop":
                pull.on_layer(stop)
            try:
                model = pull.wait(60).model
                versions = set(int(v) for t in own.values() for v in t.unique())
                found = dict(model=model, versions=sorted(versions))
            except MxError as error:
                found = dict(error=type(error).__name__, text=str(error))
        say(found)
each = [threading.Thread(target=read) for _ in range(threads)]
for thread in each: thread.start()
for thread in each: thread.join()
"""


def tensors(version: int = 1) -> dict[str, torch.Tensor]:
    """Every byte says which version it is of."""
    return {
        f"model.layers.{layer}.mlp.weight": torch.full((2 * MIB,), version, dtype=torch.uint8)
        for layer in range(LAYERS)
    }


def write(lent: dict[str, torch.Tensor], version: int) -> None:
    for tensor in lent.values():
        tensor.fill_(version)


def pulled(coordinator: str, model: str = "m", **options: Any) -> tuple[str, set[int]]:
    """Pull into tensors of this process; return the model and the versions that they hold."""
    own = tensors(0)
    with api.pull(model, coordinator=coordinator, into=own, **options) as pull:
        model = pull.wait(60).model
    return model, {int(value) for tensor in own.values() for value in torch.unique(tensor)}


#: Frees what it lends, has a chunk of it hashed again at once, and prints why it was withdrawn.
DOUBT = """
import torch
coordinator, watched = sys.argv[1:]
lent = dict(weight=torch.ones(16 << 20))  # so large that it is mapped by itself
source = api.serve(lent, model="m", coordinator=coordinator, copy=False)
server = source._server
async def doubt():
    (served,) = server._servicer.models.values()
    if watched == "unwatched":
        served.watchman = None
    lent["weight"].untyped_storage().resize_(0)
    return await server._is_right(served, 0)
assert source._loop.run(doubt()) is False
print(*(server.retirement.withdrawn or source.withdrawn).split()[:5])
source.close()
"""


class Reader:
    def __init__(self, coordinator: str, threads: int, how: str) -> None:
        env = environment(MX_PEER_STREAMS="1")
        given = (coordinator, str(threads), how)
        self.process = forkserver.python(READER, *given, env=env, imported="torch")

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def rest(self) -> list[dict[str, Any]]:
        """Let it end, and return what it printed from here on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        return [json.loads(line) for line in self.process.stdout]

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def reader(coordinator: str) -> Iterator[Callable[[int, str], Reader]]:
    started: list[Reader] = []

    def start(threads: int, how: str) -> Reader:
        started.append(Reader(coordinator, threads, how))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_ten_readers_and_ten_changes_end_in_one_revision_each(
    coordinator: str, reader: Callable[[int, str], Reader]
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        readers = reader(10, "follow")
        found = [readers.line()]
        for version in range(2, 12):
            with source.changing():
                write(lent, version)
            found.append(readers.line())
        found += readers.rest()
        assert str(source.model) == "m:main.11"
    assert not [each for each in found if "error" in each]
    assert {each["model"] for each in found} <= {"m", *(f"m:main.{i}" for i in range(2, 12))}
    for each in found:
        (version,) = each["versions"]  # not a mixture
        assert each["model"] == ("m" if version == 1 else f"m:main.{version}")
    assert [each for each in found if each["versions"] == [11]]


def test_only_what_is_named_is_hashed_again(coordinator: str) -> None:
    lent = tensors(1)
    first, second = list(lent)[:2]
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        before = source.manifest
        with source.changing([first]):
            lent[first].fill_(2)
        assert str(source.model) == "m:main.2" and pulled(coordinator)[1] == {1, 2}
        roots = zip(before.layout.tensors, before.roots, source.manifest.roots, strict=True)
        assert [t.name for t, old, new in roots if old != new] == [first]
        with pytest.raises(ConfigError, match=r"no tensors w, x"), source.changing(["x", "w"]):
            pass
        # A write to another tensor than was named is not hashed: readers find that it is wrong.
        with source.changing([first]):
            lent[second].fill_(3)
        own = tensors(0)
        with api.pull("m", coordinator=coordinator, into=own) as pull:
            error = error_of(pull)
        assert isinstance(error, IncompleteError) and "have changed" in error.message


def test_what_has_not_changed_is_no_new_revision(coordinator: str) -> None:
    with api.serve(tensors(1), model="m", coordinator=coordinator, copy=False) as source:
        with source.changing():
            pass
        assert str(source.model) == "m" and pulled(coordinator) == ("m", {1})


def test_after_an_error_inside_what_may_be_half_written_stays_withdrawn(coordinator: str) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with pytest.raises(ZeroDivisionError), source.changing():
            raise ZeroDivisionError
        assert not source.withdrawn and pulled(coordinator) == ("m", {1})
        with pytest.raises(ZeroDivisionError), source.changing():
            write(lent, 2)
            raise ZeroDivisionError
        assert "error" in source.withdrawn
        with pytest.raises(MxError):
            pulled(coordinator)
        with source.changing():
            pass
        assert not source.withdrawn and pulled(coordinator) == ("m:main.2", {2})


def test_one_change_at_a_time_and_none_after_the_end(coordinator: str) -> None:
    source = api.serve(tensors(1), model="m", coordinator=coordinator, copy=False)
    with source.changing():
        with pytest.raises(ConfigError, match="changing already"), source.changing():
            pass
        source.close()  # then there is nothing to list again
    with pytest.raises(ClosedError), source.changing():
        pass


def test_a_copy_is_not_changed(coordinator: str) -> None:
    with (
        api.serve(tensors(1), model="m", coordinator=coordinator) as source,
        pytest.raises(ConfigError, match="copy=False"),
        source.changing(),
    ):
        pass


def test_a_reader_without_follow_learns_that_the_weights_have_changed(
    coordinator: str, reader: Callable[[int, str], Reader]
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        stopped = reader(1, "stop")
        assert stopped.line()["revision"] == "main"
        with source.changing():
            write(lent, 2)
        (error,) = [each for each in stopped.rest() if "layer" not in each]
        kinds = StaleGenerationError, IncompleteError, SupersededError
        assert error["error"] in [kind.__name__ for kind in kinds]
        assert "updated" in error["text"] and "do not use it" in error["text"]


@pytest.mark.parametrize("signal_number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_dead_or_stopped_reader_holds_a_change_up_for_its_lease_at_most(
    coordinator: str, reader: Callable[[int, str], Reader], signal_number: int
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        gone = reader(1, "stop")
        gone.line()
        gone.process.send_signal(signal_number)
        with source.changing():
            write(lent, 2)
        assert pulled(coordinator) == ("m:main.2", {2})


def test_an_iterator_is_told_that_the_layers_changed(coordinator: str) -> None:
    lent, own = tensors(1), tensors(0)
    revisions: list[tuple[int, str]] = []
    changed = threading.Event()
    with (
        api.serve(
            lent, model="m", coordinator=coordinator, copy=False, max_bandwidth=8 * MIB
        ) as source,
        api.pull("m", coordinator=coordinator, into=own, follow=True, wait_s=20) as pull,
    ):
        pull.on_layer(lambda event: revisions.append((event.index, event.revision)))

        def change() -> None:
            with source.changing():
                write(lent, 2)
            changed.set()

        with pytest.raises(RevisionChangedError):
            for layer in pull.layers():
                if layer.index == 0:
                    threading.Thread(target=change).start()
        pull.wait(60)
        assert changed.wait(30)
        assert [layer.revision for layer in pull.layers()] == ["main.2"] * LAYERS
    assert revisions[0] == (0, "main") and {r for _, r in revisions[-LAYERS:]} == {"main.2"}
    assert {int(v) for t in own.values() for v in torch.unique(t)} == {2}


def test_a_write_that_was_not_announced_is_noticed_and_no_wrong_byte_is_accepted(
    coordinator: str,
) -> None:
    """A second source of the same weights gives what the lender spoilt."""
    lent = tensors(1)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False) as source,
        api.serve(tensors(1), model="m", coordinator=coordinator),
    ):
        lent["model.layers.3.mlp.weight"].fill_(9)
        with api.pull("m", peer=source.endpoint, into=tensors(0)) as pull:
            error = error_of(pull)
        assert isinstance(error, IncompleteError) and "have changed" in error.message
        deadline_s = time.monotonic() + 60
        while not source.withdrawn and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert "model.layers.3.mlp.weight" in source.withdrawn
        assert pulled(coordinator) == ("m", {1})
        with source.changing():
            lent["model.layers.3.mlp.weight"].fill_(1)
        assert not source.withdrawn and pulled(coordinator) == ("m", {1})


@pytest.mark.parametrize("how", ["replaced", "freed"])
def test_a_tensor_that_moves_is_withdrawn(coordinator: str, how: str) -> None:
    lent = tensors(1)
    name = "model.layers.3.mlp.weight"
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        if how == "replaced":
            lent[name] = lent[name].clone()
        else:
            lent[name].untyped_storage().resize_(0)
        deadline_s = time.monotonic() + 60
        # At the next grant, if not before. Tensors to fill may lie where the freed one was: then
        # they are refused until the withdrawal.
        while not source.withdrawn and time.monotonic() < deadline_s:
            with pytest.raises(MxError):
                pulled(coordinator)
        assert name in source.withdrawn
        lent[name] = torch.full((2 * MIB,), 5, dtype=torch.uint8)
        with source.changing():
            pass
        assert pulled(coordinator) == ("m:main.2", {1, 5})


def test_who_only_holds_lists_what_is_bound_already_and_nothing_else(coordinator: str) -> None:
    lent, own = tensors(1), tensors(0)
    with (
        api.serve(lent, model="m", coordinator=coordinator, copy=False) as source,
        api.pull("m", coordinator=coordinator, into=own, hold=True) as pull,
    ):
        held = pull.hold()
        with pytest.raises(BindingError, match="belongs to another source"), held.changing():
            write(own, 2)
        assert "belongs to another source" in held.withdrawn
        assert pulled(coordinator) == ("m", {1})
        with source.changing():
            write(lent, 2)
        with held.changing():
            pass
        assert not held.withdrawn and str(held.model) == "m:main.2"
        listed = {each.record.endpoint for each in api.list_sources("m", coordinator=coordinator)}
        assert listed == {source.endpoint, held.endpoint}
        assert pulled(coordinator) == ("m:main.2", {2})


def test_a_coordinator_that_restarts_while_the_weights_change(run: Run) -> None:
    address, process = start_coordinator(run)
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=address, copy=False) as source:
        with source.changing():
            process.end()
            process = start_coordinator(run, port=int(address.rpartition(":")[2]))[1]
            write(lent, 2)
        assert pulled(address)[1] == {2}
        with pytest.raises(MxError), source.changing():
            process.end()
            write(lent, 3)
        assert source.withdrawn
        start_coordinator(run, port=int(address.rpartition(":")[2]))
        with source.changing():
            pass
        assert pulled(address)[1] == {3}


def test_a_tie_that_changes_is_not_hidden(coordinator: str) -> None:
    """Every digest would hold in the layout of before, and the tensor would be another one."""
    lent = tensors(1)
    first, second = list(lent)[:2]
    lent["lm_head.weight"] = lent[first]
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with pytest.raises(ConfigError, match="tie"), source.changing():
            lent[second].fill_(2)
            lent["lm_head.weight"] = lent[second]
        assert "tie" in source.withdrawn
        with source.changing():
            lent["lm_head.weight"] = lent[first]
        assert not source.withdrawn and str(source.model) == "m:main.2"


def test_names_stand_for_all_that_share_their_memory(coordinator: str) -> None:
    lent = tensors(1)
    first = next(iter(lent))
    lent["other.weight"] = lent[first].view(torch.float16)  # another dtype: a tensor of its own
    own = {name: torch.zeros_like(tensor) for name, tensor in lent.items()}
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with source.changing([first]):
            lent[first].fill_(2)
        with api.pull("m", coordinator=coordinator, into=own) as pull:
            pull.wait(60)
    assert all(torch.equal(own[name], lent[name]) for name in lent)


def test_memory_may_be_freed_inside_while_readers_have_doubts(coordinator: str) -> None:
    """What a reader's word has hashed again has stopped before the owner may free memory."""
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        server = source._server

        async def doubt() -> None:
            (served,) = server._servicer.models.values()
            for reader in range(64):  # each has all chunks hashed again
                for chunk in range(len(served.held.manifest.grid)):
                    server._doubts.add(f"reader {reader}", served, chunk, lambda: None)

        for version in range(2, 5):
            source._loop.run(doubt())
            with source.changing():
                for name in lent:
                    lent[name].untyped_storage().resize_(0)
                    lent[name] = torch.full((2 * MIB,), version, dtype=torch.uint8)
            assert not source.withdrawn and pulled(coordinator)[1] == {version}


@pytest.mark.parametrize("watched", ["watched", "unwatched"])
def test_a_doubt_about_memory_that_was_freed_withdraws_it(coordinator: str, watched: str) -> None:
    """In a process of its own, which would die of reading what is not mapped any more. Memory that
    a pull still fills has no watchman."""
    code, out, err = ran(DOUBT, coordinator, watched)
    assert (code, out.split()) == (0, ["weight:", "replaced,", "resized", "or", "freed"]), err


@pytest.mark.parametrize("when", ["entering", "leaving"])
def test_a_pull_that_begins_on_the_threshold_of_a_change_waits_for_its_end(
    coordinator: str, when: str
) -> None:
    """Just before the memory is withdrawn for a change, and while it is listed again."""
    lent, own = tensors(1), tensors(0)
    with ExitStack() as ends:
        source = ends.enter_context(api.serve(lent, model="m", coordinator=coordinator, copy=False))
        lending, registrar = source._server.lending, source._server.registrar
        assert lending is not None and registrar is not None
        lock, state = lending._busy, Lent.ENTERING
        if when == "leaving":
            lock, state = registrar._listing, Lent.LEAVING

        async def acquire() -> None:
            await lock.acquire()

        async def release() -> None:
            if not changing_goes_on.is_set():
                changing_goes_on.set()
                lock.release()

        def change() -> None:
            with source.changing():
                write(lent, 2)

        def ready() -> bool:
            served = bool(source._server._servicer.models)  # again, and not registered yet
            return lending._state.now is state and (served or when == "entering")

        changing_goes_on, changing = threading.Event(), threading.Thread(target=change)
        source._loop.run(acquire())
        changing.start()
        ends.callback(changing.join)
        ends.callback(lambda: source._loop.run(release()))
        until(ready, "change")
        where: dict[str, Any]
        where = {"peer": source.endpoint} if when == "leaving" else {"coordinator": coordinator}
        pull = ends.enter_context(api.pull("m", into=own, follow=True, wait_s=30, **where))
        begun = pull._job.edition
        until(
            lambda: (
                pull._state.error is not None
                or pull._state.phase.startswith("waiting")
                or pull._job.edition is not begun
            ),
            "wait",
        )
        source._loop.run(release())
        assert pull.wait(60).model == "m:main.2"
        assert all(bool((tensor == 2).all()) for tensor in own.values())


def test_receipts_of_what_updates_have_replaced_are_dropped(coordinator: str) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        registrar = source._server.registrar
        assert registrar is not None
        for version in range(2, 7):
            with source.changing():
                write(lent, version)
        assert list(map(str, registrar._receipts)) == ["m:main.6"]
    with api.serve(tensors(1), model="n", coordinator=coordinator) as copied:
        registrar = copied._server.registrar
        assert registrar is not None
        for version in range(2, 7):
            copied.update(tensors(version), grace_s=0)
        # What an update replaces is listed until its readers have ended.
        assert set(map(str, registrar._receipts)) <= {"n:main.5", "n:main.6"}


def test_a_failed_block_that_replaced_tensors_can_be_followed_by_another(coordinator: str) -> None:
    lent = tensors(1)
    name = next(iter(lent))
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        with pytest.raises(ZeroDivisionError), source.changing():
            lent[name] = torch.full((2 * MIB,), 7, dtype=torch.uint8)
            raise ZeroDivisionError
        assert source.withdrawn
        with source.changing():
            pass
        assert pulled(coordinator) == ("m:main.2", {1, 7})
    with api.serve(lent, model="n", coordinator=coordinator):
        own = lent  # no claim is left: it may be filled now
        with api.pull("n", coordinator=coordinator, into=own) as pull:
            pull.wait(60)


def test_tensors_that_are_replaced_while_a_pull_waits_are_filled(coordinator: str) -> None:
    own = tensors(0)
    name = next(iter(own))
    with api.pull("m", coordinator=coordinator, into=own, wait_s=60) as pull:
        own[name] = torch.zeros(2 * MIB, dtype=torch.uint8)
        with api.serve(tensors(1), model="m", coordinator=coordinator):
            assert all(bool((t == 1).all()) for t in pull.state_dict().values())
            assert pull.state_dict()[name] is own[name]


def test_follow_does_not_follow_what_was_written_without_a_word(coordinator: str) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        lent["model.layers.7.mlp.weight"].fill_(9)
        own = tensors(0)
        with api.pull("m", peer=source.endpoint, into=own, follow=True, wait_s=1) as pull:
            error = error_of(pull, 60)
    assert isinstance(error, IncompleteError) and "have changed" in error.message


def test_an_interrupt_while_readers_are_waited_for_leaves_the_tensors_as_they_were(
    coordinator: str, reader: Callable[[int, str], Reader]
) -> None:
    lent = tensors(1)
    with api.serve(lent, model="m", coordinator=coordinator, copy=False) as source:
        reader(1, "stop").line()  # it reads, and does not go on
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt), source.changing(grace_s=4):
            pass
        timer.join()
        assert not source.withdrawn and pulled(coordinator) == ("m", {1})
        with source.changing():
            write(lent, 2)
        assert pulled(coordinator) == ("m:main.2", {2})
