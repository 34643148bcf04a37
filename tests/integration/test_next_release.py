"""This release and the next one work together, in each role and direction, while a fleet is
upgraded. The next one is this tree with more fields, more messages, and in some tests one more
layout version."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import mx
from mx.core.layout_rules import RULES, newest
from mx.core.versions import own
from mx.errors import EXIT_NO_SOURCE, EXIT_OK
from tests.support import forkserver
from tests.support.commands import Command, environment, free_port
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

THIS = ""
NEXT = "from tests.support.next_release import next_release; next_release()"
#: The next release also plans a new layout version.
LAID = f"{NEXT}; from tests.support.next_release import next_layout; next_layout()"
#: It names the new one, if no older process calls.
LATER = f"{LAID}; from tests.support.next_release import an_hour_later; an_hour_later()"
NAMES = {THIS: "this", NEXT: "next", LAID: "laid"}


class Released(Command):
    """One of our commands in one of the releases: what makes it one works on imported modules."""

    def __init__(self, release: str, *arguments: str, daemon: bool = False, **env: str) -> None:
        self.change = release
        super().__init__(*arguments, daemon=daemon, env=environment(**env))

    def report(self) -> dict[str, Any]:
        """Wait for a command with --json that succeeds, and return what it prints. Nothing that
        the other release says is skipped or warned of."""
        assert self.wait(90) == EXIT_OK, f"{self.out}\n{self.err}"
        assert "skipped" not in self.err and "Traceback" not in self.err, self.err
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    def error(self) -> dict[str, Any]:
        """Wait for a command with --json that fails, and return its error."""
        code = self.wait(90)
        error = json.loads(self.out)["error"]
        assert isinstance(error, dict) and error["exit_code"] == code, self.out
        return error


Released_ = Callable[..., Released]


@pytest.fixture
def released() -> Iterator[Released_]:
    """Start commands of a release, its name first; they end with the test."""
    with contextlib.ExitStack() as started:

        def start(release: str, *arguments: str, daemon: bool = False, **more: str) -> Released:
            command = Released(release, *arguments, daemon=daemon, **more)
            started.callback(command.end)
            return command

        yield start


def coordinate(released: Released_, release: str, port: int | None = None) -> tuple[str, Released]:
    address = f"127.0.0.1:{port or free_port()}"
    command = released(release, "--listen", address, daemon=True)
    command.until(lambda: "listens on" in command.err, "listening")
    return address, command


def offer(
    released: Released_, release: str, checkpoint: Path, coordinator: str, model: str = "m"
) -> tuple[str, Released]:
    command = released(
        release, "serve", str(checkpoint), "--model", model, "--coordinator", coordinator, "--json"
    )
    return str(command.json()["endpoint"]), command


def pull(released: Released_, release: str, coordinator: str, *more: str) -> Released:
    arguments = ("pull", "m", "--coordinator", coordinator, "--json")
    return released(release, *arguments, *more)


def listed(released: Released_, release: str, coordinator: str) -> tuple[int, int]:
    """Return the layout version in which the only model is listed, and how many sources it has."""
    found = released(release, "models", "--coordinator", coordinator, "--json").report()
    (model,) = found["models"]
    return model["layout_version"], model["sources"]


MIXED = [each for each in itertools.product((THIS, NEXT), repeat=3) if len(set(each)) > 1]
ALTERNATING = [(THIS, NEXT, THIS), (NEXT, THIS, NEXT)]


@pytest.mark.parametrize(
    ("coordinators", "sources", "readers"),
    [
        pytest.param(
            *mixed,
            # In those each role talks to both releases.
            marks=[] if mixed in ALTERNATING else pytest.mark.long,
            id="-".join(NAMES[each] for each in mixed),
        )
        for mixed in MIXED
    ],
)
@pytest.mark.usefixtures("coordinated")
def test_each_role_may_be_of_either_release(
    released: Released_,
    coordinators: str,
    sources: str,
    readers: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    coordinator, _ = coordinate(released, coordinators)
    endpoint, source = offer(released, sources, checkpoint, coordinator)
    held = pull(released, readers, coordinator, "--hold", "--transport", "tcp")
    relay = held.json()
    assert relay["verified"]
    # From the origin and the one that holds it, in the other release: they trade.
    other = THIS if readers == NEXT else NEXT
    last = pull(released, other, coordinator, "--transport", "tcp", "--out", str(tmp_path / "o"))
    assert {path["transport"] for path in last.report()["paths"]} == {"tcp"}
    assert same(load_file(next((tmp_path / "o").glob("*.safetensors"))), load_file(checkpoint))
    shared = pull(released, readers, coordinator).report()
    assert shared["bytes"] == relay["bytes"]
    named = released(readers, "pull", "m", "--from", f"peer={endpoint}", "--json").report()
    assert named["pin"] == relay["pin"]
    for verb in ("models", "sources", "topo"):
        assert released(readers, verb, "--coordinator", coordinator, "--json").report()
    assert released(readers, "plan", "m", "--coordinator", coordinator, "--json").report()
    for command in (held, source):
        command.signal(signal.SIGINT)
        assert command.wait(60) == EXIT_OK, command.err


@pytest.mark.parametrize(("caches", "readers"), [(THIS, NEXT), (NEXT, THIS)], ids=["this", "next"])
def test_a_cache_of_the_other_release(
    released: Released_, caches: str, readers: str, checkpoint: Path, tmp_path: Path
) -> None:
    coordinator, _ = coordinate(released, THIS)
    offer(released, THIS, checkpoint, coordinator)
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    where = {"MX_PEER_CACHE_SOCKET": str(folder / "socket")}
    cache = released(caches, "serve", "--cache", "--coordinator", coordinator, **where)
    cache.until((folder / "socket").exists, "the cache")
    command = ("pull", "m", "--from", "auto", "--coordinator", coordinator, "--json")
    report = released(readers, *command, **where).report()
    assert [step["step"] for step in report["steps"] if step.get("used")] or report["paths"]


def test_a_fleet_is_upgraded_while_it_runs(released: Released_, checkpoint: Path) -> None:
    """Pulls of both releases succeed at each step: sources one by one, then the coordinator."""
    address, coordinator = coordinate(released, THIS)
    port = int(address.rpartition(":")[2])

    def both_pull() -> None:
        running = [pull(released, each, address, "--wait", "30s") for each in (THIS, NEXT)]
        pins = {each.report()["pin"] for each in running}
        assert len(pins) == 1

    fleet = [offer(released, THIS, checkpoint, address)[1] for _ in range(2)]
    both_pull()
    for old in list(fleet):
        fleet.append(offer(released, NEXT, checkpoint, address)[1])
        both_pull()
        old.signal(signal.SIGINT)
        assert old.wait(60) == EXIT_OK, old.err
        both_pull()
    coordinator.signal(signal.SIGINT)
    assert coordinator.wait(60) == EXIT_OK, coordinator.err
    coordinate(released, NEXT, port)
    both_pull()


# -- layouts --------------------------------------------------------------------------------------


def test_the_new_layout_begins_when_all_plan_it(released: Released_, checkpoint: Path) -> None:
    coordinator, _ = coordinate(released, LATER)
    offer(released, LAID, checkpoint, coordinator)
    assert listed(released, LAID, coordinator) == (newest() + 1, 1)
    report = pull(released, LAID, coordinator, "--transport", "tcp").report()
    assert report["verified"]
    # What only plans the older one is told both.
    error = pull(released, THIS, coordinator).error()
    assert (error["type"], error["exit_code"]) == ("CoordinatorVersionError", EXIT_NO_SOURCE)
    assert f"in layout {newest() + 1}" in error["message"]
    assert f"this mx plans layout {own().layout}" in error["message"]
    serving = ("serve", str(checkpoint), "--model", "m", "--coordinator", coordinator, "--json")
    error = released(THIS, *serving).error()
    assert error["type"] == "CoordinatorVersionError"
    assert f"in layout {newest() + 1}" in error["message"]


@pytest.mark.parametrize(
    "coordinators",
    [pytest.param(THIS, id="this"), pytest.param(LAID, id="laid", marks=pytest.mark.long)],
)
def test_a_mixed_fleet_keeps_the_older_layout(
    released: Released_, coordinators: str, checkpoint: Path, tmp_path: Path
) -> None:
    """The swarm is one, whichever release comes first."""
    coordinator, _ = coordinate(released, coordinators)
    # The older release is in use: it asks, though nothing is listed yet.
    released(THIS, "models", "--coordinator", coordinator, "--json").report()
    newer, _ = offer(released, LAID, checkpoint, coordinator)
    older, _ = offer(released, THIS, checkpoint, coordinator)
    for release in (THIS, LAID):
        assert listed(released, release, coordinator) == (newest(), 2)
        for endpoint in (newer, older):
            out = tmp_path / f"{NAMES[release]}-{endpoint == newer}"
            where = ("--from", f"peer={endpoint}", "--transport", "tcp", "--out", str(out))
            assert released(release, "pull", "m", "--json", *where).report()["verified"]
            assert same(load_file(next(out.glob("*.safetensors"))), load_file(checkpoint))


def test_a_later_source_takes_the_layout_that_is_listed(
    released: Released_, checkpoint: Path
) -> None:
    """Also while the older release is not in use any more, and also those of the newer one."""
    coordinator, _ = coordinate(released, LATER)
    _, old = offer(released, THIS, checkpoint, coordinator)
    offer(released, LAID, checkpoint, coordinator)
    assert listed(released, LAID, coordinator) == (newest(), 2)
    old.signal(signal.SIGINT)
    assert old.wait(60) == EXIT_OK, old.err
    offer(released, LAID, checkpoint, coordinator)
    assert listed(released, LAID, coordinator) == (newest(), 2)
    report = pull(released, LAID, coordinator, "--transport", "tcp").report()
    assert report["verified"]


_SHARE = """
import sys, torch
from mx import config
from mx.fleet.offering import ask_offered, offer, pull_offered
from mx.core.types import ModelKey
from mx.core.variant import ProcessingKey

key, settings = ProcessingKey(engine="test", version="1", dtype="fp32"), config.load()
tensors, model = {"a": torch.ones(4), "b": torch.zeros(4)}, ModelKey("m", "main", "checkpoint")
if sys.argv[1] == "offer":
    assert offer(tensors, model, key, settings) is not None
elif sys.argv[1] == "none":
    assert ask_offered(model, key, settings) is None
else:
    with pull_offered(ask_offered(model, key, settings), settings) as pull:
        assert torch.equal(pull.state_dict()["a"], tensors["a"])
"""


@pytest.mark.usefixtures("torch_is_forked")
def test_what_a_process_offers_to_the_cache_has_a_layout_of_both_releases(
    released: Released_, tmp_path: Path
) -> None:
    """No coordinator names one; and what the cache holds in another one is of no use."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    where = {"MX_PEER_CACHE_SOCKET": str(folder / "socket")}
    coordinator, _ = coordinate(released, THIS)
    cache = released(LAID, "serve", "--cache", "--coordinator", coordinator, **where)
    cache.until((folder / "socket").exists, "the cache")
    # A release that plans the later layout only, as the one after the next.
    after = f"{LAID}; from mx.core.layout_rules import RULES; del RULES[{newest()}]"
    for release, verb in ((LAID, "offer"), (THIS, "pull"), (after, "none")):
        code, env = f"{release}\n{_SHARE}", environment(**where)
        with forkserver.python(code, verb, env=env, imported="torch", errors=True) as ran:
            _, err = ran.communicate(timeout=60)
        assert ran.returncode == EXIT_OK, err


@pytest.mark.parametrize(
    "embedded",
    [pytest.param(False, id="daemon"), pytest.param(True, id="embedded", marks=pytest.mark.long)],
)
def test_a_coordinator_that_starts_again_keeps_the_layout_of_those_that_come_back(
    released: Released_, checkpoint: Path, *, embedded: bool
) -> None:
    """It does not know them yet: a source that is there before them takes the older layout."""
    coordinator, daemon = coordinate(released, LAID)
    _, old = offer(released, THIS, checkpoint, coordinator)
    old.signal(signal.SIGSTOP)
    daemon.signal(signal.SIGINT)
    assert daemon.wait(60) == EXIT_OK, daemon.err
    if embedded:
        # As it is where no address is set: it is the default that a source embeds one at.
        default = f"mx.config.Settings.is_set = lambda self, name: name != {'coordinator'!r}"
        release = f"{LAID}; import mx.config; {default}"
        where = {"MX_PEER_COORDINATOR": coordinator}
        serving = released(release, "serve", str(checkpoint), "--model", "m", "--json", **where)
        assert serving.json()["embedded"]
    else:
        coordinate(released, LAID, int(coordinator.rpartition(":")[2]))
        offer(released, LAID, checkpoint, coordinator)
    old.signal(signal.SIGCONT)
    both = (newest(), 2)
    old.until(lambda: listed(released, THIS, coordinator) == both, "its registration")
    assert pull(released, THIS, coordinator, "--transport", "tcp").report()["verified"]


def test_what_a_pull_holds_from_disk_has_the_layout_of_the_fleet(
    released: Released_, checkpoint: Path
) -> None:
    """No source has described it: it asks before it takes memory, as a source does."""
    coordinator, _ = coordinate(released, THIS)
    held = pull(released, LAID, coordinator, "--from", f"disk={checkpoint}", "--hold")
    pinned = f"m@{held.json()['pin']}"  # it binds no name
    held.until(lambda: listed(released, THIS, coordinator) == (newest(), 1), "its registration")
    reading = ("pull", pinned, "--coordinator", coordinator, "--json", "--transport", "tcp")
    assert released(THIS, *reading).report()["verified"]


def test_without_a_coordinator_a_pull_holds_what_both_releases_plan(
    released: Released_, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, port = newest(), free_port()
    monkeypatch.setitem(RULES, before + 1, RULES[before])
    with mx.pull("m", path=checkpoint, hold=True, coordinator=f"127.0.0.1:{port}") as pull:
        pull.wait(60)
        coordinator, _ = coordinate(released, THIS, port)  # it comes later, and plans the older one
        with pull.hold():
            assert listed(released, THIS, coordinator) == (before, 1)


def test_a_pin_of_two_revisions_in_two_layouts_is_found_by_both_releases(
    released: Released_, checkpoint: Path
) -> None:
    coordinator, _ = coordinate(released, LATER)
    offer(released, LAID, checkpoint, coordinator)
    offer(released, THIS, checkpoint, coordinator, "m:v2")
    found = released(THIS, "models", "--coordinator", coordinator, "--json").report()["models"]
    assert {each["revision"]: each["layout_version"] for each in found} == {
        "main": newest() + 1,
        "v2": newest(),
    }
    reading = ("pull", f"m@{found[0]['identity']}", "--coordinator", coordinator, "--json")
    for release in (THIS, LAID):
        assert released(release, *reading).report()["verified"]
    assert released(LAID, "pull", "m", "--coordinator", coordinator, "--json").report()["verified"]
