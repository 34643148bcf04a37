"""mx.broadcast: four processes of one group, over gloo, with everything that a rank may do."""

from __future__ import annotations

import json
import signal
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mx import api
from mx.api.holding import lend
from mx.core.types import ModelKey
from tests.integration.lending import net
from tests.support import forkserver
from tests.support.commands import Run, environment, start_coordinator

# Four processes, and groups that notice a lost rank after seconds: on a busy machine it takes long.
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(240),
    pytest.mark.usefixtures("torch_is_forked"),
]

#: What every rank's program begins with.
HEADER = """
import hashlib, json, os, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
import mx
from mx.errors import MxError
from tests.integration.lending import equal, everything, net, pointers
rank, size, timeout_s, store, coordinator = json.loads(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                        timeout=timedelta(seconds=timeout_s))

def say(**what):
    sys.stdout.write(json.dumps(what) + chr(10))
    sys.stdout.flush()

def tried(work):
    try:
        report = work()
    except MxError as error:
        return dict(error=type(error).__name__, text=error.message, hint=error.hint)
    return dict(identity=report.identity, model=report.model, layers=report.layers,
                bytes=report.bytes)

def held_by(tensors):
    return sorted({int(end) for tensor in tensors.values() for end in tensor.aminmax()})

def digest(tensors):
    found = hashlib.blake2b()
    for name in sorted(tensors):
        found.update(name.encode())
        raw = tensors[name].detach().contiguous().reshape(-1).view(torch.uint8)
        found.update(raw.numpy().tobytes())
    return found.hexdigest()
"""


class Rank:
    """One rank's process; it prints lines of JSON."""

    def __init__(self, code: str, *arguments: Any) -> None:
        self.process = forkserver.python(
            HEADER + textwrap.dedent(code),
            json.dumps(arguments),
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            imported="torch",
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline() or "{}")
        return found

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextmanager
def group(
    code: str, folder: Path, *, size: int = 4, timeout_s: float = 60, coordinator: str = ""
) -> Iterator[list[Rank]]:
    """The ranks of a group, each with this program; killed in the end."""
    with ExitStack() as ends:
        ranks = []
        for rank in range(size):
            arguments = (rank, size, timeout_s, str(folder / "store"), coordinator)
            ranks.append(Rank(code, *arguments))
            ends.enter_context(ranks[-1].process)
            ends.callback(ranks[-1].process.kill)
        yield ranks


def lines(ranks: list[Rank]) -> list[dict[str, Any]]:
    """The next line of each rank."""
    return [rank.line() for rank in ranks]


#: All that a group survives, one after the other in the same processes.
LIVING = """
    from mx.fleet.buckets import BUCKET_BYTES
    def leftovers():
        return len(os.listdir("/proc/self/fd")), [t.name for t in threading.enumerate()]
    names = []
    module = net(1 if rank == 0 else 10 + rank)
    rotary = [block.rotary.clone() for block in module.layers]
    where = pointers(module)
    found = tried(lambda: mx.broadcast(module, on_layer=lambda layer: names.append(layer.name)))
    kept = all(torch.equal(b.rotary, old) for b, old in zip(module.layers, rotary))
    say(digest=digest(module.state_dict()), names=names, where=pointers(module) == where,
        kept=kept, **found)
    before = leftovers()

    # Any tensors, in any order, of which the ranks agree on nothing but their forms.
    dtypes = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64]
    for seed in range(15):
        forms, values = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(rank)
        def pick(most): return int(torch.randint(0, most, (1,), generator=forms))
        tensors = {}
        for index in range(1 + pick(12)):
            shape = [pick(7) for _ in range(pick(4))] if pick(3) else [1 + pick(3), 700, 1500]
            dtype = dtypes[pick(len(dtypes))]
            size_ = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 2, (size_,), generator=values, dtype=torch.uint8)
            made = raw.view(dtype).reshape(shape) if size_ else torch.empty(shape, dtype=dtype)
            order = torch.randperm(len(shape), generator=forms).tolist()
            tensors["layers.%d.w%d" % (pick(5), index)] = made.permute(order)
            if pick(4) == 0:
                tensors["tied.%d" % index] = made
        if tensors and rank % 2:
            tensors = dict(reversed(tensors.items()))
        found = tried(lambda: mx.broadcast(tensors, src=seed % size))
        say(digest=digest(tensors), count=len(tensors), **found)

    def model(value, **more):
        sizes = {"layers.0.w": 1 << 20, "layers.1.w": 3 * BUCKET_BYTES, "layers.1.norm": 1000}
        made = {n: torch.full((k,), value, dtype=torch.uint8) for n, k in sizes.items()}
        return made | more

    # What was hashed changes at its source before it is sent.
    tensors = model(rank)
    def spoil(layer):
        if rank == 2 and layer.name == "layers.0":
            tensors["layers.1.w"][-1] = 77
    say(**tried(lambda: mx.broadcast(tensors, src=2, on_layer=spoil)))

    # Ranks whose tensors differ: those of no rank are written to.
    read_only = model(rank)["layers.0.w"].numpy()
    read_only.flags.writeable = False
    tensors = [model(rank), model(rank, extra=torch.ones(2)), model(rank),
        {"layers.0.w": read_only, "layers.1.w": torch.ones(3)}][rank]
    found = tried(lambda: mx.broadcast(tensors))
    say(kept=all(set(map(int, t.ravel()[:9])) <= {rank, 1} for t in tensors.values()), **found)

    tensors = {"a": torch.ones(4, 4)[:, :2]}
    say(**tried(lambda: mx.broadcast(tensors)))
    tensors = {"a": torch.ones(4)}
    say(**tried(lambda: mx.broadcast(tensors, src=min(rank, 1))))
    say(**tried(lambda: mx.broadcast(tensors, src=9)))
    say(**tried(lambda: mx.broadcast("tensors" if rank == 3 else tensors)))
    def fail(layer):
        if rank == 2:
            raise ValueError("of the caller's own")
    say(**tried(lambda: mx.broadcast(tensors, on_layer=fail)))

    # Ranks that are elsewhere, or have other releases, or whose source describes nonsense.
    from mx.fleet import broadcasting
    if rank == 3:
        every = [torch.zeros(9, dtype=torch.int64) for _ in range(size)]
        dist.all_gather(every, torch.arange(9))
        say(error="PeerProtocolError")
    else:
        say(**tried(lambda: mx.broadcast(tensors)))
    def patched(name, make, on):
        kept = getattr(broadcasting, name)
        if rank == on:
            setattr(broadcasting, name, make(kept))
        say(kept=bool((tensors["a"] == 1).all()), **tried(lambda: mx.broadcast(tensors)))
        setattr(broadcasting, name, kept)
    def spoiled(at):
        def make(kept):
            def given(*arguments):
                found = kept(*arguments)
                data = bytearray(found.data)
                data[at] ^= 1
                found.data = bytes(data)
                return found
            return given
        return make
    patched("PROTOCOL", lambda kept: kept + 1, 2)
    patched("_facts", lambda kept: lambda *each: [*kept(*each)[:-1], 1 << 40], 0)
    for at in (0, 70, -33, -1):
        patched("_given", spoiled(at), 0)

    # Global ranks 3 and 1 are ranks 0 and 1 of a group of their own.
    some = dist.new_group([3, 1], timeout=timedelta(seconds=timeout_s))
    tensors = model(rank)
    say(value=int(tensors["layers.1.w"][-1]), **tried(lambda: mx.broadcast(tensors, some, src=3)))
    say(values=sorted(set(int(t[-1]) for t in tensors.values())))
    if rank % 2:
        dist.destroy_process_group(some)
    some = None

    # After all of this the group is in step, and nothing is left.
    tensors = model(rank)
    found = tried(lambda: mx.broadcast(tensors, src=1))
    say(values=held_by(tensors), **found)
    say(left=leftovers() == before, now=str(leftovers()), before=str(before))
    dist.barrier()
    dist.destroy_process_group()
    say(**tried(lambda: mx.broadcast(tensors)))
"""


def _same(found: list[dict[str, Any]], error: str) -> str:
    """All ranks raised this error, with the same text, which is returned."""
    assert [each.get("error") for each in found] == [error] * len(found), found
    (text,) = {each["text"] for each in found}
    return str(text)


def _identity(tensors: Any) -> str:
    held = lend(tensors, ModelKey("m"))
    held.release()
    return held.manifest.ref.identity.hex()


def test_a_group_that_lives(tmp_path: Path) -> None:
    with group(LIVING, tmp_path) as ranks:
        found = lines(ranks)
        assert {each["identity"] for each in found} == {_identity(net(1))}
        assert len({each["digest"] for each in found}) == 1
        assert all(each["where"] and each["kept"] for each in found)
        names = ["embed", *(f"layers.{i}" for i in range(6)), "head"]
        assert [each["names"] for each in found] == [names] * 4

        for seed in range(15):
            found = lines(ranks)
            assert "error" not in found[0], (seed, found)
            assert len({each["digest"] for each in found}) == 1, (seed, found)
            assert len({each["identity"] for each in found}) == 1

        found = lines(ranks)
        text = _same(found, "IntegrityError")
        assert "rank 0: layers.1.w: got other bytes" in text and "rank 2:" not in text
        assert [("as they were" in each["hint"]) for each in found] == [False, False, True, False]
        assert all("mx.pull" in found[rank]["hint"] for rank in (0, 1, 3))

        found = lines(ranks)
        text = _same(found, "ConfigError")
        assert "no tensor was written to: rank 1: `tensors` does not fit the model: not in" in text
        assert "rank 3: `tensors` does not fit the model: missing here: layers.1.norm; " in text
        assert "layers.0.w is read-only" in text and "layers.1.w is F32 [3] here" in text
        assert all(each["kept"] for each in found)

        text = _same(lines(ranks), "ConfigError")
        assert "rank 0: a: memory with gaps" in text and text.endswith("(make it contiguous)")
        assert "{0: 0, 1: 1, 2: 1, 3: 1}" in _same(lines(ranks), "ConfigError")
        assert "rank 0: `src=9` is not in the group" in _same(lines(ranks), "ConfigError")
        assert "rank 3: cannot take tensors from a str" in _same(lines(ranks), "ConfigError")
        text = _same(lines(ranks), "LocalError")
        assert text.endswith("taken over the weights: rank 2: ValueError: of the caller's own")

        found = lines(ranks)
        assert [each["error"] for each in found] == ["PeerProtocolError"] * 4
        assert found[0]["text"].startswith("rank 3: in another collective")
        for error, words in (
            ("PeerVersionError", "by rank: {0: 1, 1: 1, 2: 2, 3: 1}"),
            ("PeerProtocolError", "rank 0 describes its weights in 1"),
            *[("IntegrityError", "no tensor was written to: rank 1: ")] * 4,
        ):
            found = lines(ranks)
            text = _same(found, error)
            assert words in text and all(each["kept"] for each in found), text
            assert error != "IntegrityError" or ("; rank 2: " in text and "rank 0: " not in text)

        found = lines(ranks)
        assert [each.get("error") for each in found] == ["ConfigError", None, "ConfigError", None]
        assert found[0]["text"] == "rank 0 is not in the group"
        assert [each["values"] for each in lines(ranks)] == [[0], [3], [2], [3]]

        found = lines(ranks)
        assert [(each["values"], each["layers"]) for each in found] == [([1], 2)] * 4
        found = lines(ranks)
        assert all(each["left"] for each in found), found
        assert "in no process group" in _same(lines(ranks), "ConfigError")


#: Every rank lends its tensors as the same model. The first one writes to them and broadcasts, four
#: times: the second time it writes meanwhile, the last time the last rank is killed in the middle.
LENDING = """
    tensors = {"layers.%d.w" % i: torch.full((3 << 20,), 0, dtype=torch.uint8) for i in range(12)}
    source = mx.serve(tensors, model="m", coordinator=coordinator, copy=False)
    dist.barrier()
    for value in (1, 2, 3, 4):
        if rank == 0:
            with source.changing():
                for tensor in tensors.values():
                    tensor.fill_(value)
        def on_layer(layer):
            if value == 2 and rank == 0 and layer.index == 4:
                tensors["layers.11.w"][-1] = 9
            if value == 4 and rank == 3 and layer.index == 4:
                say(layer=layer.name)
                sys.stdin.readline()
        found = tried(lambda: mx.broadcast(source, on_layer=on_layer))
        values = held_by(tensors)
        say(values=values, withdrawn=source.withdrawn, listed=str(source.model), **found)
        if rank == 0 and value < 4:
            sys.stdin.readline()
    if rank:
        say(again=tried(lambda: mx.broadcast(source)))
        # What the others do who have missed it: pull.
        source.close()
        with mx.pull("m", coordinator=coordinator, into=tensors, hold=True) as pull:
            model = pull.wait(60).model
            held = pull.hold()
            say(model=model, values=sorted(set(int(t[-1]) for t in tensors.values())))
            sys.stdin.readline()
            held.close()
    else:
        sys.stdin.readline()
    source.close()
"""


def _pulled(coordinator: str) -> tuple[str, set[int], int]:
    """What a process gets that was in no group: the model, what the tensors hold, the sources."""
    own = {f"layers.{i}.w": torch.empty(3 << 20, dtype=torch.uint8) for i in range(12)}
    with api.pull("m", coordinator=coordinator, into=own) as pull:
        model = pull.wait(60).model
    sources = [s for s in api.list_sources(coordinator=coordinator) if str(s.record.model) == model]
    return model, {int(end) for tensor in own.values() for end in tensor.aminmax()}, len(sources)


def test_lent_tensors_change_as_one_revision_or_none_and_a_rank_is_killed(
    run: Run, tmp_path: Path
) -> None:
    coordinator, _ = start_coordinator(run)
    with group(LENDING, tmp_path, timeout_s=15, coordinator=coordinator) as ranks:
        found = lines(ranks)
        assert [(each["values"], each["listed"]) for each in found] == [([1], "m:main.2")] * 4
        assert {each["model"] for each in found} == {"m:main.2"}
        assert not any(each["withdrawn"] for each in found)
        assert _pulled(coordinator) == ("m:main.2", {1}, 4)

        ranks[0].tell()
        found = lines(ranks)
        assert "rank 1: layers.11.w: got other bytes" in _same(found, "IntegrityError")
        assert [each["listed"] for each in found] == ["m:main.3", *["m:main.2"] * 3]
        assert [bool(each["withdrawn"]) for each in found] == [False, True, True, True]

        ranks[0].tell()  # what was withdrawn is listed again with what comes next
        found = lines(ranks)
        assert [(each["values"], each["listed"]) for each in found] == [([3], "m:main.4")] * 4
        assert not any(each["withdrawn"] for each in found)
        assert _pulled(coordinator) == ("m:main.4", {3}, 4)

        ranks[0].tell()
        assert ranks[3].line()["layer"] == "layers.4"
        assert _pulled(coordinator) == ("m:main.5", {4}, 1)  # only the first lists it meanwhile
        ranks[3].process.send_signal(signal.SIGKILL)
        found = lines(ranks[:3])
        for each in found:
            assert each["error"] in ("PeerLostError", "PeerTimeoutError"), each
            assert "the process group broke" in each["text"]
            assert "make a new one" in each["hint"]
        assert (found[0]["values"], found[0]["withdrawn"]) == ([4], "")
        assert "as they were" in found[0]["hint"]
        for each in found[1:]:
            assert each["withdrawn"] and "hold parts of both" in each["hint"]

        for rank in ranks[1:3]:  # the group stays broken
            assert rank.line()["again"]["error"] in ("PeerLostError", "PeerTimeoutError")
        for rank in ranks[1:3]:
            assert rank.line() == {"model": "m:main.5", "values": [4]}
        assert _pulled(coordinator) == ("m:main.5", {4}, 3)
        for rank in ranks[:3]:
            rank.tell()
            assert rank.process.wait(60) == 0


#: The first rank stops in the middle. The second one is interrupted, and again while it waits for
#: the buckets that may still land in its tensors.
LATE = """
    import time
    value = torch.full((3 << 20,), rank, dtype=torch.uint8)
    tensors = {"layers.%d.w" % i: value.clone() for i in range(12)}
    from mx.fleet.process_group import ProcessGroup
    wait = ProcessGroup.drain
    def drain(group):
        say(waits=True)
        wait(group)
    ProcessGroup.drain = drain
    def on_layer(layer):
        if layer.index == (6 if rank else 4):
            say(layer=layer.name)
            if not rank:
                sys.stdin.readline()
    def lent():
        with mx.serve(tensors, model="m", coordinator=coordinator, copy=False):
            return True
    try:
        found = tried(lambda: mx.broadcast(tensors, on_layer=on_layer))
    except KeyboardInterrupt:
        try:
            found = dict(lent=lent())
        except MxError as error:
            found = dict(error=type(error).__name__, text=error.message)
    say(**found)
    if rank:
        sys.stdin.readline()
        while True:
            try:
                lent()
                break
            except MxError:
                time.sleep(0.05)
        say(values=[int(t[-1]) for t in tensors.values()])
"""


def test_tensors_that_may_still_be_written_to_are_not_given_away(run: Run, tmp_path: Path) -> None:
    coordinator, _ = start_coordinator(run)
    with group(LATE, tmp_path, size=2, timeout_s=20, coordinator=coordinator) as ranks:
        assert lines(ranks) == [{"layer": "layers.4"}, {"layer": "layers.6"}]
        ranks[1].process.send_signal(signal.SIGINT)
        assert ranks[1].line() == {"waits": True}
        ranks[1].process.send_signal(signal.SIGINT)
        found = ranks[1].line()
        assert found["error"] == "ConfigError" and "in use" in found["text"], found
        for rank in reversed(ranks):
            rank.tell()
        values = ranks[1].line()["values"]
        assert values[:9] == [0] * 9 and values[10:] == [1, 1], (
            values
        )  # some came after it had left
        assert ranks[0].line() == {"waits": True}
        assert ranks[0].line()["error"] in ("PeerLostError", "PeerTimeoutError")


#: The second rank is interrupted in the middle. The first one gets on once that one has left.
INTERRUPTED = """
    import signal
    value = torch.full((3 << 20,), rank, dtype=torch.uint8)
    tensors = {"layers.%d.w" % i: value.clone() for i in range(12)}
    source = mx.serve(tensors, model="m%d" % rank, coordinator=coordinator, copy=False)
    def on_layer(layer):
        if rank == 1 and layer.index == 4:
            os.kill(os.getpid(), signal.SIGINT)
    try:
        found = tried(lambda: mx.broadcast(source if rank else tensors, on_layer=on_layer))
    except KeyboardInterrupt:
        found = dict(error="KeyboardInterrupt")
    say(withdrawn=source.withdrawn, **found)
    source.close()
    with mx.serve(tensors, model="n%d" % rank, coordinator=coordinator, copy=False):
        say(threads=[t.name for t in threading.enumerate() if t.name.startswith("mx-hash")])
"""


def test_an_interrupted_rank(run: Run, tmp_path: Path) -> None:
    coordinator, _ = start_coordinator(run)
    with group(INTERRUPTED, tmp_path, size=2, timeout_s=10, coordinator=coordinator) as ranks:
        interrupted = ranks[1].line()
        assert interrupted["error"] == "KeyboardInterrupt"
        assert interrupted["withdrawn"] == "`changing` ended with an error"
        assert ranks[1].line() == {"threads": []}
        found = ranks[0].line()
        assert found["error"] in ("PeerLostError", "PeerTimeoutError")
        assert not found["withdrawn"]
        assert ranks[0].line() == {"threads": []}
        assert [rank.process.wait(60) for rank in ranks] == [0, 0]
