"""NAME means the newest revision that its owner has published, whether or not it has a source."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx import api, config
from mx.core.types import ModelKey, SourceRole
from mx.errors import MxError, NoSourceError, SupersededError, UnknownModelError
from mx.keyfile import make
from tests.support.clients import client_of
from tests.support.commands import Run, free_port, start_coordinator

pytestmark = pytest.mark.integration

LAYERS, LAYER_BYTES = 8, 64 << 10


def weights(version: int, layer_bytes: int = LAYER_BYTES) -> dict[str, Any]:
    """Weights of which every byte is `version`."""
    return {
        f"model.layers.{layer}.w": np.full(layer_bytes, version, np.uint8)
        for layer in range(LAYERS)
    }


@pytest.fixture
def settings(run: Run, tmp_path: Path) -> config.Settings:
    """Those of the owner of all names, and of readers."""
    return settings_of(start_coordinator(run)[0], tmp_path)


def settings_of(coordinator: str, folder: Path) -> config.Settings:
    key = folder / "owner.key"
    if not key.exists():
        make(key)
    return replace(
        config.load({}, environ={}),
        coordinator=coordinator,
        name_key=str(key),
        coordinated_reading="always",
        streams=1,
        stall_timeout_s=2.0,
        reader_lease_s=2.0,
    )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Reader:
    """A pull by name into memory of its own, on a thread."""

    def __init__(self, settings: config.Settings, **options: Any) -> None:
        self._into = memoryview(bytearray(10 << 20))
        self._settings, self._options = settings, options
        self.error: Exception | None = None
        self.report: api.PullReport | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with api.pull(
                "m", into=self._into, transport="tcp", settings=self._settings, **self._options
            ) as pull:
                self.report = pull.wait(120)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def version(self) -> int:
        """Return what it has read, once it has ended."""
        self._thread.join(120)
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self._into[0]


def hold(stack: ExitStack, settings: config.Settings) -> None:
    """Keep what the name means now as a relay."""
    pull = stack.enter_context(api.pull("m", hold=True, transport="tcp", settings=settings))
    pull.wait(60)
    stack.enter_context(pull.hold())


def hold_half(stack: ExitStack, settings: config.Settings, layers: int = 5) -> None:
    """Begin to pull, and stop with some layers, which others may read."""
    going, stopped = threading.Event(), threading.Event()
    stack.callback(going.set)

    def stop(event: api.LayerEvent) -> None:
        if event.index + 1 >= layers:
            stopped.set()
            going.wait(120)

    pull = stack.enter_context(api.pull("m", transport="tcp", settings=settings))
    pull.on_layer(stop)
    assert stopped.wait(60)
    until_s = time.monotonic() + 60
    while all(
        each.record.role is not SourceRole.RELAY
        for each in api.list_sources("m", coordinator=settings.coordinator)
    ):
        assert time.monotonic() < until_s
        time.sleep(0.1)


def write(lent: dict[str, Any], version: int) -> None:
    for tensor in lent.values():
        tensor[:] = version


def test_no_reader_gets_an_older_revision_while_the_newest_is_changed(
    settings: config.Settings, stack: ExitStack
) -> None:
    lent = weights(1)
    source = stack.enter_context(api.serve(lent, model="m", copy=False, settings=settings))
    hold(stack, settings)  # of `main`, which nothing else holds from now on
    with source.changing():
        write(lent, 2)
    assert Reader(settings).version() == 2
    with source.changing():
        with pytest.raises((NoSourceError, UnknownModelError)) as refused:
            Reader(settings).version()
        assert "m means m:main.2" in refused.value.message
        assert "m:main" in refused.value.hint and "allow_older" in refused.value.hint
        older = Reader(settings, allow_older=True)
        assert older.version() == 1
        assert older.report is not None and older.report.newest == "m:main.2"
        assert older.report.to_json()["newest"] == "m:main.2"
        assert Reader(settings, revision="main").version() == 1
        waits = Reader(settings, wait_s=60)
        follows = Reader(settings, wait_s=60, follow=True)
        write(lent, 3)
    assert waits.version() == follows.version() == 3
    assert waits.report is not None and not waits.report.newest


def test_a_revision_that_no_sources_have_whole_captures_no_newcomer(
    settings: config.Settings, stack: ExitStack
) -> None:
    lent = weights(1)
    source = stack.enter_context(api.serve(lent, model="m", copy=False, settings=settings))
    hold_half(stack, settings)
    with source.changing():
        with pytest.raises(NoSourceError, match="no source has whole now"):
            Reader(settings).version()
        waits = Reader(settings, wait_s=60)
        time.sleep(0.5)  # it looks, and waits
        write(lent, 2)
    assert waits.version() == 2


def test_a_pull_whose_revision_was_superseded_and_cannot_be_completed_asks_again(
    settings: config.Settings, stack: ExitStack
) -> None:
    source = stack.enter_context(
        api.serve(weights(1, 1 << 20), model="m", max_bandwidth="1MB/s", settings=settings)
    )
    waits = Reader(settings)
    with api.pull("m", transport="tcp", settings=settings) as told:
        first = next(told.layers())
        assert first.index == 0
        source.update(weights(2, 1 << 20), grace_s=0)
        # Who has seen a layer can't go over to other weights unseen.
        with pytest.raises(SupersededError, match=r"m means m:main\.2 now"):
            told.wait(60)
    assert waits.version() == 2


def test_an_update_that_is_interrupted_once_it_is_published_stays(
    settings: config.Settings, stack: ExitStack
) -> None:
    """A reader may have seen it: what the name means would have no source any more."""
    source = stack.enter_context(api.serve(weights(1), model="m", settings=settings))
    registrar = source._server.registrar
    assert registrar is not None
    listing = registrar.list

    async def interrupted(held: Any, **given: Any) -> ModelKey:
        key = await listing(held, **given)
        if given.get("replaces"):
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.3)
        return key

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(registrar, "list", interrupted)
        source.update(weights(2), grace_s=0)
    assert Reader(settings).version() == 2
    assert str(source.model) == "m:main.2"
    source.update(weights(3), grace_s=0)
    assert Reader(settings).version() == 3


def test_an_update_in_a_doubt_is_what_the_name_means_when_that_ends(
    run: Run, tmp_path: Path, stack: ExitStack
) -> None:
    """Only the owner's key, and no receipt, is with who updates."""
    state = "--state", f"sqlite:{tmp_path / 'state.db'}", "--lease-s", "3"
    given = *state, "--receipt-key", str(tmp_path / "receipts")
    address, daemon = start_coordinator(run, *given)
    settings = settings_of(address, tmp_path)
    source = stack.enter_context(api.serve(weights(1), model="m", settings=settings))
    hold(stack, settings)
    source.close()
    daemon.process.kill()
    daemon.wait()
    for left in tmp_path.glob("state.db*"):
        left.unlink()
    _, daemon = start_coordinator(run, *given, port=int(address.rpartition(":")[2]))
    daemon.until(lambda: "coordinator.doubt" in daemon.err, "doubt")
    stack.enter_context(api.serve(weights(2), model="m", update=True, settings=settings))
    assert Reader(settings, wait_s=60).version() == 2


async def test_a_reader_tells_a_coordinator_that_has_restarted_what_it_has_seen(
    run: Run, tmp_path: Path
) -> None:
    """It knows of updates of which no source that is back does."""
    key = "--receipt-key", str(tmp_path / "receipts")
    address, daemon = start_coordinator(run, *key)
    settings = settings_of(address, tmp_path)
    async with client_of(address) as client:
        with ExitStack() as stack:
            source = stack.enter_context(api.serve(weights(1), model="m", settings=settings))
            source.update(weights(2), grace_s=0)
            seen = (await client.resolve("m")).seen
            assert seen
        daemon.process.kill()
        daemon.wait()
        _, daemon = start_coordinator(run, *key, port=int(address.rpartition(":")[2]))
        with api.serve(weights(1), model="m", settings=settings):
            assert (await client.resolve("m")).model == ModelKey("m", "main")
            assert (await client.resolve("m", seen=b"x" + seen[1:])).model == ModelKey("m", "main")
            with pytest.raises(UnknownModelError, match=r"m means m:main\.2"):
                await client.resolve("m", seen=seen)
            with pytest.raises(UnknownModelError, match=r"m means m:main\.2"):
                await client.resolve("m")


async def test_a_reader_gets_nothing_of_a_stranger_who_comes_before_the_owner_is_back(
    run: Run, tmp_path: Path
) -> None:
    key = "--receipt-key", str(tmp_path / "receipts")
    address, daemon = start_coordinator(run, *key)
    settings = settings_of(address, tmp_path)
    make(tmp_path / "other.key")
    stranger = replace(settings, name_key=str(tmp_path / "other.key"))
    async with client_of(address) as client:
        with api.serve(weights(1), model="m", settings=settings):
            seen = (await client.resolve("m")).seen
        daemon.process.kill()
        daemon.wait()
        _, daemon = start_coordinator(run, *key, port=int(address.rpartition(":")[2]))
        with api.serve(weights(2), model="m", settings=stranger):
            assert (await client.resolve("m")).sources  # it is the only one that is known
            with pytest.raises(UnknownModelError, match="by its pin only"):
                await client.resolve("m", seen=seen)
            with api.serve(weights(3), model="m", settings=settings) as source:
                (found,) = (await client.resolve("m")).sources
                assert found.endpoint == source.endpoint


def test_what_a_reader_has_seen_of_a_lost_state_is_followed_by_its_owner(
    run: Run, tmp_path: Path, stack: ExitStack
) -> None:
    """The coordinator and the owner have begun anew: a reader alone knows of the update."""
    kept, port = ("--receipt-key", str(tmp_path / "receipts")), free_port()
    address, coordinator = start_coordinator(run, *kept, port=port)
    settings = settings_of(address, tmp_path)
    lent = weights(1)
    with api.serve(lent, model="m", copy=False, settings=settings) as source:
        with source.changing():
            write(lent, 2)
        assert Reader(settings).version() == 2
    coordinator.end()
    start_coordinator(run, *kept, port=port)
    stack.enter_context(api.serve(weights(3), model="m", update=True, settings=settings))
    assert Reader(settings, wait_s=60).version() == 3


def test_a_state_that_came_back_older_gives_no_reader_less_than_it_has_seen(
    run: Run, tmp_path: Path, stack: ExitStack
) -> None:
    """A relay holds the older revision, and no source has said yet that the state is older."""
    state, backup = tmp_path / "state", tmp_path / "backup"
    state.mkdir()
    kept = "--receipt-key", str(tmp_path / "receipts"), "--state", f"sqlite:{state / 'state.db'}"
    address, coordinator = start_coordinator(run, *kept, port=free_port())
    settings, lent = settings_of(address, tmp_path), weights(1)
    source = stack.enter_context(api.serve(lent, model="m", copy=False, settings=settings))
    hold(stack, settings)
    coordinator.signal(signal.SIGTERM)
    coordinator.wait()
    shutil.copytree(state, backup)
    _, coordinator = start_coordinator(run, *kept, port=int(address.rpartition(":")[2]))
    until_registered(address, "m")
    with source.changing():
        write(lent, 2)
    assert Reader(settings).version() == 2
    coordinator.end()
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    run("--listen", address, *kept, daemon=True)
    read = set[int]()
    until_s = time.monotonic() + 60
    while not read and time.monotonic() < until_s:
        with contextlib.suppress(MxError):
            read.add(Reader(settings).version())
    assert read == {2}


def until_registered(address: str, name: str) -> None:
    """Wait until all sources have said that they are there since the coordinator began."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        found = api.list_sources(name, coordinator=address)
        if found and all(each.lease_left_s < 6.0 for each in found):  # the first one is longer
            return
        time.sleep(0.1)
    raise AssertionError(f"not all sources of {name} are back")
