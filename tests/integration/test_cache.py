"""A host's cache: one copy for all, least recently used first out, and what goes wrong with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from mx import api, config, runtime
from mx.api.common import transports
from mx.api.holding import lend
from mx.api.serving import offer as serve_here
from mx.api.serving import source_options, start_source
from mx.core.types import ManifestRef, ModelKey
from mx.core.variant import ProcessingKey
from mx.errors import IncompleteError, LocalError, MxError, NoSourceError
from mx.fleet.cache_keeper import Id, Keeper
from mx.fleet.caching import cache, cached
from mx.fleet.offering import ask_offered, offer, pull_offered
from mx.units import MIB
from mx.wire.cache import CacheClient, CachedModelAddress, WantedModel
from tests.support.caching import Caching, origin, start_cache, unavailable
from tests.support.commands import Command, Run, commands, start_coordinator

_REASON = unavailable()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(180),
    pytest.mark.skipif(_REASON is not None, reason=_REASON or ""),
]

#: Two of the models fit, three do not.
MEMORY = "64MB"
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def shared_run() -> Iterator[Run]:
    with commands() as start:
        yield start


@pytest.fixture(scope="module")
def elsewhere(
    shared_run: Run, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Command]]:
    """A coordinator, and a source of each model that can't be attached to."""
    coordinator, _ = start_coordinator(shared_run)
    with ExitStack() as stack:
        for seed, name in enumerate(NAMES):
            path = tmp_path_factory.mktemp(name) / "model.safetensors"
            write_checkpoint(path, llama_shapes(8, 384, 1024, 2048), seed=seed)
            source = stack.enter_context(origin(path, name, coordinator))
        yield coordinator, source


@pytest.fixture
def caching(run: Run, elsewhere: tuple[str, Command], tmp_path: Path) -> Caching:
    tmp_path.chmod(0o700)
    return start_cache(run, elsewhere[0], tmp_path, MEMORY)


def attached(pull: api.Pull) -> bool:
    return all(path.attached for path in pull.wait(60).paths)


def ask(caching: Caching, wanted: WantedModel) -> CachedModelAddress | str:
    """Ask the cache itself."""

    async def asking() -> CachedModelAddress | str:
        client = CacheClient(str(caching.socket), timeout_s=5.0)
        try:
            return await client.hold(wanted)
        finally:
            await client.close()

    loop = runtime.acquire()
    try:
        return loop.run(asking())
    finally:
        runtime.release(loop)


def test_many_pulls_make_one_and_share_its_memory(caching: Caching) -> None:
    with ExitStack() as stack:
        pulls = [stack.enter_context(caching.pull("one")) for _ in range(6)]
        assert all(attached(pull) for pull in pulls)
        assert {pull.cached_at for pull in pulls} == {caching.status().models[0].endpoint}
        expected = pulls[0].buffer().tobytes()
        mine = pulls[1].buffer()
        mine[:8] = bytes(8)  # a private copy of that page
        assert pulls[2].buffer().tobytes() == expected
        (held,) = caching.status().models
        assert held.in_use
        del mine
    assert caching.held() == ["one"]
    assert not caching.status().models[0].in_use


def test_the_least_recently_used_leaves_and_what_is_in_use_stays(caching: Caching) -> None:
    for name in ("one", "two", "one"):
        with caching.pull(name) as pull:
            assert attached(pull)
    with caching.pull("three") as three:
        assert attached(three)
        assert caching.held() == ["one", "three"]
        assert caching.status().evictions == 1
        with caching.pull("one") as one:
            assert attached(one)
            with caching.pull("two") as two:  # no room while both are in use: it goes without
                assert not attached(two)
                assert two.cached_at == ""
            assert caching.held() == ["three", "one"]
    with caching.pull("two") as two:
        assert attached(two)


def test_a_model_that_is_larger_than_the_cache(
    run: Run, elsewhere: tuple[str, Command], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    caching = start_cache(run, elsewhere[0], tmp_path, "16MB")
    with caching.pull("one") as pull:
        assert not attached(pull)
    assert caching.held() == []
    refusal = ask(caching, WantedModel("one", coordinator=caching.coordinator))
    assert isinstance(refusal, str) and "the cache's memory is 16 MB" in refusal


def test_memory_lives_while_it_is_mapped_when_the_cache_dies(
    run: Run, elsewhere: tuple[str, Command], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    started: list[Command] = []

    def start(*arguments: str, **more: object) -> Command:
        started.append(run(*arguments, **more))
        return started[-1]

    caching = start_cache(start, elsewhere[0], tmp_path, MEMORY)
    with caching.pull("one") as first:
        assert attached(first)
        expected = first.buffer().tobytes()
        started[-1].signal(signal.SIGKILL)
        started[-1].wait()
        assert first.buffer().tobytes() == expected
        with caching.pull("one") as alone:  # the socket is there, and no process listens
            assert not attached(alone)
            assert alone.buffer().tobytes() == expected
        again = start_cache(run, elsewhere[0], tmp_path, MEMORY)
        with again.pull("one") as third:
            assert attached(third)


def test_a_cache_that_is_stopped_is_done_without(
    run: Run, elsewhere: tuple[str, Command], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    started: list[Command] = []

    def start(*arguments: str, **more: object) -> Command:
        started.append(run(*arguments, **more))
        return started[-1]

    caching = start_cache(start, elsewhere[0], tmp_path, MEMORY)
    started[-1].signal(signal.SIGSTOP)
    with caching.pull("one") as pull:
        assert not attached(pull)


def test_the_source_dies_while_the_cache_pulls(
    run: Run, large_checkpoint: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    coordinator, _ = start_coordinator(run)
    caching = start_cache(run, coordinator, tmp_path, "1GB")
    with (
        origin(large_checkpoint, "m", coordinator, "--max-bandwidth", "20MB/s") as source,
        caching.pull("m") as pull,
    ):
        while not pull.progress().bytes_done:
            time.sleep(0.02)
        source.signal(signal.SIGKILL)
        with pytest.raises((IncompleteError, NoSourceError)):
            pull.wait(60)
    assert caching.held() == []
    assert caching.status().held_bytes == 0


def test_what_can_be_attached_anyway_is_not_held_twice(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    coordinator, _ = start_coordinator(run)
    caching = start_cache(run, coordinator, tmp_path, MEMORY)
    with (
        api.serve(checkpoint, model="m", coordinator=coordinator, settings=caching.settings),
        caching.pull("m") as pull,
    ):
        assert attached(pull)
    assert caching.held() == []


def test_the_command_that_shows_what_it_holds(run: Run, caching: Caching, tmp_path: Path) -> None:
    with caching.pull("two") as pull:
        assert attached(pull)
        found = run("cache", "--json", env=caching.environment).json()
        shown = run("cache", env=caching.environment)
        assert shown.wait() == 0, shown.err
    (held,) = found["models"]
    assert (held["model"], held["mapped_by"], held["in_use"]) == ("two", 1, True)
    assert held["bytes"] == found["held_bytes"] and 0 <= held["idle_s"] < 600
    assert found["memory_bytes"] == 64_000_000
    head, _, names, row, *_ = shown.out.splitlines()
    assert "of 64 MB used, 1 model, 0 evictions" in head
    assert "attached by" in names and row.startswith("two ") and " 1  sources" in row
    assert "CacheStatus" in repr(caching.status()) and "two" in repr(caching.status())


def test_the_command_without_a_cache(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    none = run("cache", "--cache-socket", str(tmp_path / "cache.sock"))
    off = run("cache", "--cache-socket", "off")
    assert none.wait() == 3 and "no cache runs at" in none.err and "--memory" in none.err
    assert off.wait() == 2 and "--cache-socket switches the cache off" in off.err


def test_one_cache_at_a_socket(caching: Caching) -> None:
    second = caching.start("serve", "--cache", env=caching.environment)
    assert second.wait() == 1
    assert "a cache runs at" in second.err
    assert "Traceback" not in second.err


def test_misuse_is_told(caching: Caching) -> None:
    for arguments, words in (
        (("serve", "--cache", "x.safetensors"), "serves no CHECKPOINT"),
        (("serve", "--cache", "--listen", "127.0.0.1:7777"), "a port of its own"),
        (("serve", "--cache", "--cache-socket", "off"), "switch the cache off"),
        (("serve", "/x", "--memory", "1GB"), "--memory"),
    ):
        command = caching.start(*arguments, env=caching.environment)
        assert command.wait() == 2, command.err
        assert words in command.err
        assert "Traceback" not in command.err


def test_hostile_clients_get_errors_and_the_cache_lives(caching: Caching) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(caching.socket))
        sock.sendall(os.urandom(4096))
    coordinator = caching.coordinator
    for wanted in (
        WantedModel("x" * 5000, coordinator=coordinator),
        WantedModel("a\nb", coordinator=coordinator),
        WantedModel("", coordinator=coordinator),
        WantedModel("one@zz", coordinator=coordinator),
        WantedModel("one", variant="tp=9/2", coordinator=coordinator),
    ):
        try:
            answer = ask(caching, wanted)
        except MxError:
            continue
        assert isinstance(answer, str)
    for wanted, words in (
        (WantedModel("one", coordinator="10.0.0.1:7600"), "asks the coordinator at"),
        (WantedModel("one", offered_at="10.0.0.1:7601"), "not on this host"),
        (WantedModel("one", offered_at="127.0.0.1:1"), ""),
        (WantedModel("one", variant="x=1", only_if_held=True), "no process has lent"),
    ):
        answer = ask(caching, wanted)
        assert isinstance(answer, str) and words in answer
    assert caching.held() == []
    with caching.pull("one") as pull:
        assert attached(pull)


def test_a_cache_in_this_process_leaves_nothing(
    elsewhere: tuple[str, Command], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    settings = config.load(
        {"coordinator": elsewhere[0], "cache_socket": str(tmp_path / "cache.sock")},
        environ={"HOME": "/nonexistent"},
    )
    with cache(memory=64 * MIB, settings=settings) as running:
        with pytest.raises(LocalError, match="runs at"):
            cache(settings=settings)
        with api.pull("one", settings=settings) as pull:
            assert attached(pull)
        assert [str(each.model) for each in running.status().models] == ["one"]
    assert cached(settings=settings) is None
    assert not any(tmp_path.iterdir())


def test_a_model_that_is_evicted_twice_counts_for_each_of_its_readers(
    run: Run, elsewhere: tuple[str, Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers that attach between the look at who reads and the eviction keep the memory."""
    tmp_path.chmod(0o700)
    caching = Caching(elsewhere[0], tmp_path / "cache.sock", run)
    looked = Keeper._in_use

    async def too_early(keeper: Keeper) -> dict[Id, int]:
        await looked(keeper)
        return {}

    def evict_one(*names: str) -> None:
        for name in names:
            with caching.pull(name) as pull:
                assert attached(pull)
        assert "one" not in caching.held()

    monkeypatch.setattr(Keeper, "_in_use", too_early)
    with cache(memory=MEMORY, settings=caching.settings):
        with _reader(caching) as first:
            evict_one("two", "three")
            nbytes = caching.status().lingering_bytes
            assert nbytes > 20 * MIB
            with _reader(caching):
                evict_one("two")
                assert caching.status().lingering_bytes == 2 * nbytes
                assert first.stdin is not None
                first.stdin.close()
                first.wait(30)
                assert caching.status().lingering_bytes == nbytes
        assert caching.status().lingering_bytes == 0


# -- what processes offer -------------------------------------------------------------------------

MADE_FROM = ModelKey("one", "main")
KEY = ProcessingKey(engine="test", dtype="float32")


@contextmanager
def _answering(value: float, settings: config.Settings) -> Iterator[tuple[str, ManifestRef]]:
    """A source of other processes' offers: its endpoint, and what its weights are."""
    key = ModelKey(MADE_FROM.name, MADE_FROM.revision, str(KEY))
    held = lend({"weight": torch.full((1 << 20,), value)}, key)
    loop = runtime.acquire()
    try:
        local = config.given(settings, listen="127.0.0.1:0")
        server = loop.run(start_source(source_options(local, live=True), transports()))
        try:
            loop.run(serve_here(server, held, None))
            yield server.endpoint, held.manifest.ref
        finally:
            loop.run(server.close())
    finally:
        runtime.release(loop)
        held.release()


def test_no_other_process_answers_in_the_place_of_one_that_offers(caching: Caching) -> None:
    """It may listen at the port that the first one had, under the same name."""
    settings = caching.settings
    with _answering(1.0, settings) as (_, right), _answering(2.0, settings) as (endpoint, other):
        assert right.pin != other.pin
        name = f"{MADE_FROM.name}@{right.pin.hex()}"
        wanted = WantedModel(name, MADE_FROM.revision, str(KEY), offered_at=endpoint)
        answer = ask(caching, wanted)
        assert isinstance(answer, str)
        assert f"does not hold one[{KEY}]@{right.pin.hex()}" in answer
        assert caching.held() == []
    assert ask_offered(MADE_FROM, KEY, settings) is None


def test_no_other_process_answers_in_the_place_of_the_cache(caching: Caching) -> None:
    settings = caching.settings
    held = offer({"weight": torch.ones(1 << 20)}, MADE_FROM, KEY, settings)
    assert held is not None and held == ask_offered(MADE_FROM, KEY, settings)
    with pull_offered(held, settings) as pull:
        assert torch.equal(pull.state_dict()["weight"], torch.ones(1 << 20))
    with _answering(2.0, settings) as (endpoint, _):
        elsewhere = replace(held, endpoint=endpoint)
        with (
            pytest.raises(MxError, match=held.ref.pin.hex()[:8]),
            pull_offered(elsewhere, settings) as pull,
        ):
            pull.wait(60)
    other = ProcessingKey(engine="test", dtype="bfloat16")
    assert ask_offered(MADE_FROM, other, settings) is None
    assert ask_offered(MADE_FROM._replace(revision="v2"), KEY, settings) is None


@contextmanager
def _reader(caching: Caching) -> Iterator[subprocess.Popen[str]]:
    """A process that has attached "one"; it ends with its standard input."""
    code = (
        "import sys\n"
        "from mx import api\n"
        "with api.pull('one') as pull:\n"
        "    print(all(path.attached for path in pull.wait(60).paths), flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        # A cache does not count its own children: the shell's child is none.
        ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=caching.environment,
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            assert process.stdout.readline() == "True\n"
            yield process
        finally:
            process.stdin.close()
            process.wait(30)
