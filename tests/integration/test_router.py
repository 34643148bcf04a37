"""Routers and replicas between real processes: what is told of replicas that load, take requests,
die and stop, over a coordinator that is killed and comes back, and what hostile ones can claim."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import pytest

import mx
from benchmarks.checkpoints import write_checkpoint
from mx.core.versions import HINT, own
from mx.errors import (
    CapacityError,
    ClosedError,
    ConfigError,
    CoordinatorError,
    CoordinatorVersionError,
    UnknownModelError,
)
from mx.fleet import Watch
from mx.fleet.router import MAX_WATCHES
from mx.wire.v1 import coordinator_pb2 as pb
from tests.integration.other_versions import NEWER, RunOther, other_coordinator, run_other
from tests.integration.replica import PORT
from tests.support import forkserver
from tests.support.commands import Run, commands, environment, free_port, serve, start_coordinator
from tests.support.outcomes import until
from tests.support.stubs import blocking_stub

pytestmark = pytest.mark.integration

__all__ = ["run_other"]  # a fixture

LAYERS = 8
LAYER_NBYTES = 2 * 512 * 1024
LAST = LAYERS - 1
Kind = mx.EventKind


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 MB in 8 layers."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_checkpoint(
        path, {f"model.layers.{n}.mlp.up_proj.weight": (512, 1024) for n in range(LAYERS)}
    )
    return path


@pytest.fixture(scope="module")
def site(weights: Path) -> Iterator[str]:
    """A coordinator with one source of `m`, slow enough to be looked at; its address."""
    with commands() as run:
        address, _ = start_coordinator(run)
        serve(run, weights, "m", address, "--max-bandwidth", "4MB/s")
        yield address


class Replica:
    """tests/integration/replica.py in a process."""

    def __init__(self, coordinator: str, mode: str, accept_at: int, model: str = "m") -> None:
        code = "from tests.integration.replica import main; main()"
        self.process = forkserver.python(
            code, coordinator, model, mode, str(accept_at), env=environment()
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def until(self, line: str) -> None:
        assert self.process.stdout is not None
        for said in self.process.stdout:
            if said.strip() == line:
                return
        raise AssertionError(f"it ended before {line!r}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


Start = Callable[..., Replica]


@pytest.fixture
def replica() -> Iterator[Start]:
    started: list[Replica] = []

    def start(*arguments: object, **named: object) -> Replica:
        started.append(Replica(*arguments, **named))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.end()


class Story:
    """What a watch tells, event by event, without the origin's."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.told: list[mx.FleetEvent] = []

    def until(self, *kinds: mx.EventKind) -> mx.FleetEvent:
        """Return the next event of one of these kinds."""
        while True:
            event = self.watch.next(60)
            assert event is not None, "the watch ended"
            if event.replica is not None and event.replica.origin:
                continue
            self.told.append(event)
            if event.kind in kinds:
                return event

    def layers(self) -> list[int]:
        """The layers that became ready, in the order in which they were told."""
        return [n for event in self.told for n in event.layers]


@pytest.fixture
def router(site: str) -> Iterator[mx.Router]:
    with mx.Router(site) as made:
        yield made


def test_a_replica_is_followed_from_its_first_layer_to_its_end(
    site: str, router: mx.Router, replica: Start
) -> None:
    with router.watch("m") as watch:
        story = Story(watch)
        story.until(Kind.SYNCED)
        process = replica(site, "hold", 1)
        accepts = story.until(Kind.ACCEPTS_REQUESTS).replica
        assert accepts is not None and accepts.requests == f"127.0.0.1:{PORT}"
        assert accepts.state is mx.ReplicaState.ACCEPTING
        assert 0 < accepts.layers_ready < accepts.layers == LAYERS
        loaded = story.until(Kind.FULLY_LOADED).replica
        assert loaded is not None and loaded.state is mx.ReplicaState.SERVING
        assert story.layers() == list(range(LAYERS))
        process.until("loaded")
        assert [each.state for each in watch.replicas if not each.origin] == [loaded.state]
        (same,) = [each for each in router.replicas("m") if not each.origin]
        assert (same.replica_id, same.state) == (loaded.replica_id, loaded.state)
        process.say("stop")
        stopped = story.until(Kind.STOPS_REQUESTS).replica
        assert stopped is not None and stopped.state is mx.ReplicaState.LOADED
        process.say("end")
        lost = story.until(Kind.LOST)
        assert lost.replica is not None and lost.replica.replica_id == loaded.replica_id
    ids = {event.replica.replica_id for event in story.told if event.replica is not None}
    assert len(ids) == 1, "one process was told as several replicas"


@pytest.mark.parametrize("mode", ["attach", "only", "plain", "callback"])
def test_pulls_that_give_nothing_take_requests_too(
    site: str, router: mx.Router, replica: Start, mode: str
) -> None:
    with router.watch("m") as watch:
        story = Story(watch)
        story.until(Kind.SYNCED)
        process = replica(site, mode, 0)
        accepts = story.until(Kind.ACCEPTS_REQUESTS).replica
        assert accepts is not None and accepts.requests == f"127.0.0.1:{PORT}"
        process.until("loaded")
        if accepts.state is not mx.ReplicaState.SERVING:
            story.until(Kind.FULLY_LOADED)
        # It stays listed for as long as its pull is open, though nothing is moved any more.
        assert watch.replicas[-1].state is mx.ReplicaState.SERVING
        process.signal(signal.SIGKILL)
        story.until(Kind.STOPS_REQUESTS)
        story.until(Kind.LOST)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_that_dies_or_stops_in_mid_load_is_lost(
    site: str, router: mx.Router, replica: Start, number: signal.Signals
) -> None:
    with router.watch("m") as watch:
        story = Story(watch)
        process = replica(site, "plain", 0)
        process.until("layer 1")
        story.until(Kind.ACCEPTS_REQUESTS)
        process.signal(number)
        lost = story.until(Kind.LOST)
        assert lost.replica is not None and not lost.replica.requests
        assert lost.replica.layers_ready < LAYERS
        if number == signal.SIGSTOP:  # and is back once it goes on
            process.signal(signal.SIGCONT)
            again = story.until(Kind.ACCEPTS_REQUESTS).replica
            assert again is not None and again.replica_id == lost.replica.replica_id


def test_a_source_says_where_it_takes_requests_and_keeps_that_in_an_update(
    run: Run, weights: Path, tmp_path: Path
) -> None:
    address, _ = start_coordinator(run)
    other = tmp_path / "model.safetensors"
    write_checkpoint(other, {"model.layers.0.mlp.up_proj.weight": (512, 1024)}, seed=7)
    with (
        mx.serve(weights, model="m", coordinator=address) as source,
        mx.Router(address) as router,
        router.watch("m") as watch,
    ):
        source.accept_requests(9001)
        host = source.endpoint.rpartition(":")[0]
        for event in watch:
            if event.kind is Kind.ACCEPTS_REQUESTS:
                assert event.replica is not None and event.replica.requests == f"{host}:9001"
                break
        source.update(other)
        for event in watch:
            if event.kind is Kind.ACCEPTS_REQUESTS:
                assert event.replica is not None and event.replica.model.revision != "main"
                break
        (status,) = router.sources("m")
        assert status.record.requests_port == 9001 and status.record.model.revision != "main"
        source.accept_requests(0)
        for event in watch:
            if event.kind is Kind.STOPS_REQUESTS:
                break
        for port in (-1, 65536, True, "80", None):
            with pytest.raises(ConfigError, match="port"):
                source.accept_requests(port)  # type: ignore[arg-type]
    with pytest.raises(ClosedError):
        source.accept_requests(9001)


def test_a_watch_outlives_a_coordinator_that_is_killed_and_comes_back(
    run: Run, weights: Path, replica: Start
) -> None:
    address, coordinator = start_coordinator(run)
    serve(run, weights, "m", address, "--max-bandwidth", "20MB/s")
    with mx.Router(address) as router, router.watch("m") as watch:
        story = Story(watch)
        stays, dies = replica(address, "plain", 0), replica(address, "hold", 0)
        for each in (stays, dies):
            each.until("loaded")
        while sum(each.state is mx.ReplicaState.SERVING for each in watch.replicas) < 2:
            story.until(Kind.FULLY_LOADED)
        before = {each.replica_id: each.state for each in watch.replicas}
        coordinator.signal(signal.SIGKILL)
        coordinator.wait()
        assert story.until(Kind.DISCONNECTED).reason
        assert {each.replica_id: each.state for each in watch.replicas} == before
        dies.signal(signal.SIGKILL)
        start_coordinator(run, port=int(address.rpartition(":")[2]))
        begins = len(story.told)
        lost = story.until(Kind.LOST)
        assert lost.replica is not None and "did not come back" in lost.reason
        told = [event.kind for event in story.told[begins:]]
        assert Kind.SYNCED in told and Kind.REPLICA_UP not in told
        left = {each.replica_id: each.state for each in watch.replicas}
        assert left == {key: state for key, state in before.items() if key in left}
        assert len(left) == 2 and lost.replica.replica_id not in left


def test_both_forms_ask_the_same(site: str) -> None:
    async def ask() -> tuple[object, ...]:
        async with mx.Router(site) as router:
            events = []
            watch = router.watch("m")
            async for event in watch:
                events.append(event.kind)
                if event.kind is Kind.SYNCED:
                    break
            return (
                [each.record.endpoint for each in await router.sources_async("m")],
                (await router.estimate_async("m", attach=False)).paths,
                [each.host for each in await router.place_async("m", [""])],
                [each.replica_id for each in await router.replicas_async("m") if each.origin],
                events[-1],
            )

    with mx.Router(site) as router, router.watch("m") as watch:
        while (event := watch.next(30)) is not None and event.kind is not Kind.SYNCED:
            pass
        asked = (
            [each.record.endpoint for each in router.sources("m")],
            router.estimate("m", attach=False).paths,
            [each.host for each in router.place("m", [""])],
            [each.replica_id for each in router.replicas("m") if each.origin],
            Kind.SYNCED,
        )
    assert asyncio.run(ask()) == asked


def test_estimates_rest_on_what_pulls_have_measured(
    site: str, router: mx.Router, replica: Start
) -> None:
    assert router.estimate("m").attaches
    process = replica(site, "plain", 0)
    process.until("loaded")
    found = router.estimate("m", attach=False)
    endpoint = found.paths[0].source.endpoint
    assert found.measured and "measured" in str(found)
    assert found.size.nbytes == LAYERS * LAYER_NBYTES
    assert found.size.first_layer_nbytes == LAYER_NBYTES
    # The source gives 4 MB/s, whatever loopback could do.
    assert found.seconds_to_ready is not None and found.seconds_to_ready > 1
    assert found.seconds_to_first_layer is not None
    assert found.seconds_to_first_layer < found.seconds_to_ready
    assert found.costs[0].endpoint == endpoint and found.costs[0].nbytes == found.size.nbytes
    # A host elsewhere does not reach what listens on loopback.
    place = mx.topology().topology.place
    there = json.dumps(asdict(place)).replace(place.boot_id, str(uuid.uuid4()))
    ranked = router.place("m", [there, "", endpoint])
    assert [each.attaches for each in ranked] == [True, True, False]
    assert not ranked[-1].paths and "does not reach" in ranked[-1].why_none


def test_wrong_questions_are_answered_with_errors_that_say_what_to_do(router: mx.Router) -> None:
    with pytest.raises(UnknownModelError):
        router.estimate("no-such-model")
    with pytest.raises(ConfigError, match="nothing is known of the host 'mars'"):
        router.estimate("m", at="mars")
    with pytest.raises(ConfigError, match="not a place"):
        router.estimate("m", at='{"nics": 7}')
    with pytest.raises(ConfigError, match="`at=7`"):
        router.estimate("m", at=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`hosts`"):
        router.place("m", "localhost")
    for name in ("", "a@b@c", "m:"):
        with pytest.raises(ConfigError):
            router.estimate(name)
    with pytest.raises(ConfigError):
        router.watch(7)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError), router.watch("not-there-yet") as watch:
        while (event := watch.next(2)) is not None:
            assert event.kind is Kind.SYNCED
    assert router.place("m", []) == []


def test_a_router_without_a_coordinator_says_so_and_its_watch_waits() -> None:
    address = f"127.0.0.1:{free_port()}"
    router = mx.Router(address)
    with pytest.raises(CoordinatorError, match="no coordinator answers"):
        router.sources()
    watch = router.watch("m")
    event = watch.next(30)
    assert event is not None and event.kind is Kind.DISCONNECTED
    router.close()
    assert watch.next() is None, "a watch of a closed router goes on"
    with pytest.raises(ClosedError):
        router.sources()
    with pytest.raises(ClosedError):
        router.watch()
    router.close()


def test_watches_are_bounded_and_end_with_their_consumer_waiting(router: mx.Router) -> None:
    watches = [router.watch("m") for _ in range(MAX_WATCHES)]
    with pytest.raises(CapacityError, match=f"{MAX_WATCHES} watches"):
        router.watch("m")
    for watch in watches:  # the streams of one connection are enough for all
        while (event := watch.next(30)) is None or event.kind is not Kind.SYNCED:
            assert event is not None
    ended = threading.Event()

    def consume() -> None:
        for _ in watches[0]:
            pass
        ended.set()

    thread = threading.Thread(target=consume)
    thread.start()
    for watch in watches:
        watch.close()
    thread.join(30)
    assert ended.is_set()
    router.watch("m").close()


def test_a_watch_that_is_not_read_begins_again(
    router: mx.Router, site: str, monkeypatch: pytest.MonkeyPatch, replica: Start
) -> None:
    monkeypatch.setattr("mx.fleet.router_watch.MAX_UNREAD", 8)
    with router.watch("m") as watch:
        process = replica(site, "plain", 0)
        process.until("loaded")
        while not [each for each in watch.replicas if each.state is mx.ReplicaState.SERVING]:
            pass
        told: list[mx.EventKind] = []
        wanted = {Kind.MISSED: 1, Kind.SYNCED: 1, Kind.REPLICA_UP: 2, Kind.ACCEPTS_REQUESTS: 1}
        while any(told.count(kind) < count for kind, count in wanted.items()):
            event = watch.next(30)
            assert event is not None
            told = [event.kind] if event.kind is Kind.MISSED else [*told, event.kind]
        assert told[0] is Kind.MISSED and told.count(Kind.REPLICA_UP) == 2


@pytest.mark.parametrize(
    "field",
    [
        {"requests_port": 65_536},
        {"requests_port": 1 << 31},
        {"requests_port": 80, "requests_host": "a\nb"},
        {"requests_port": 80, "requests_host": "a" * 300},
        {"requests_port": 80, "requests_host": "a/b:c"},
    ],
)
def test_hostile_reports_are_refused(site: str, field: dict[str, Any]) -> None:
    report = pb.PullProgress(
        pull_id=str(uuid.uuid4()),
        model={"name": "m", "revision": "main", "variant": "checkpoint"},
        phase=pb.PullProgress.PHASE_RUNNING,
        layers=4,
        **field,
    )
    with grpc.insecure_channel(site) as channel:
        stub = blocking_stub(channel, pb.DESCRIPTOR.services_by_name["Coordinator"])
        with pytest.raises(grpc.RpcError) as caught:
            stub.Progress(
                iter([pb.ProgressRequest(pull=report)]),
                metadata=(("mx-versions", own().encode()),),
                timeout=10,
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value


def test_no_other_process_speaks_for_a_pull_that_reports(
    site: str, router: mx.Router, replica: Start
) -> None:
    process = replica(site, "plain", 0)
    process.until("layer 1")
    with router.watch("m") as watch:
        story = Story(watch)
        accepts = story.until(Kind.ACCEPTS_REQUESTS).replica
        assert accepts is not None
        lie = pb.PullProgress(
            pull_id=accepts.replica_id,
            model={"name": "m", "revision": "main", "variant": "checkpoint"},
            phase=pb.PullProgress.PHASE_RUNNING,
            layers=4,
            requests_port=6666,
        )
        with grpc.insecure_channel(site) as channel:
            stub = blocking_stub(channel, pb.DESCRIPTOR.services_by_name["Coordinator"])
            with pytest.raises(grpc.RpcError):
                stub.Progress(
                    iter([pb.ProgressRequest(pull=lie)]),
                    metadata=(("mx-versions", own().encode()),),
                    timeout=10,
                )
        (known,) = [each for each in watch.replicas if each.replica_id == accepts.replica_id]
        assert known.requests == f"127.0.0.1:{PORT}"


def test_a_port_at_which_nothing_listens_is_told_as_the_replica_says_it(
    site: str, router: mx.Router, replica: Start
) -> None:
    """mx tells what replicas claim, and does not connect: the router's own requests find out."""
    replica(site, "plain", 0).until("layer 1")
    with router.watch("m") as watch:
        accepts = Story(watch).until(Kind.ACCEPTS_REQUESTS).replica
    assert accepts is not None
    host, _, port = accepts.requests.rpartition(":")
    with pytest.raises(ConnectionRefusedError), socket.create_connection((host, int(port)), 5):
        pass


def test_a_pull_from_a_peer_has_no_coordinator_to_tell(site: str, router: mx.Router) -> None:
    # Those of the tests before this one are listed until their leases end.
    (status,) = until(lambda: len(found := router.sources("m")) == 1 and found, "one source")
    with (
        pytest.raises(ConfigError, match="no coordinator"),
        mx.pull("m", peer=status.record.endpoint) as pull,
    ):
        pull.accept_requests(8000)
    with pytest.raises(ClosedError), mx.pull("m", coordinator=site) as pull:
        pull.close()
        pull.accept_requests(8000)


def test_a_router_needs_no_torch(site: str) -> None:
    code = (
        "import sys, mx\n"
        f"with mx.Router({site!r}) as router:\n"
        "    print(router.estimate('m'), router.sources('m'), router.replicas('m'))\n"
        "    for event in router.watch('m'):\n"
        "        if event.kind is mx.EventKind.SYNCED: break\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "attached" in done.stdout


def test_a_coordinator_of_another_version_ends_a_watch(run_other: RunOther) -> None:
    address = other_coordinator(run_other, NEWER)
    with mx.Router(address) as router, router.watch("m") as watch:
        for _ in range(2):
            with pytest.raises(CoordinatorVersionError, match=HINT):
                watch.next(60)
        with pytest.raises(CoordinatorVersionError):
            router.sources()


def test_what_takes_requests_is_shown_to_users(site: str, run: Run, replica: Start) -> None:
    process = replica(site, "plain", 0)
    process.until("loaded")
    top = run("top", "--json", "--coordinator", site).json()
    assert f"127.0.0.1:{PORT}" in [pull["requests"] for pull in top["pulls"]]
    shown = run("top", "--once", "--coordinator", site)
    assert shown.wait() == 0 and f"requests at 127.0.0.1:{PORT}" in shown.out
