"""Pulls that stay, or wait, give all that they hold once the origin is gone: whatever came before
others could find them, and whatever dead source is still listed."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import write_checkpoint
from benchmarks.hosts import Hosts, Link, unavailable
from mx.errors import EXIT_INCOMPLETE, EXIT_NO_SOURCE, EXIT_OK
from tests.support import forkserver
from tests.support.commands import HostCommand, environment
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("coordinated")]

ORIGIN, DIRECTORY, FIRST, SECOND, NEWCOMER = "origin", "directory", "first", "second", "new"
MBIT_PER_S = 100
LAYERS = 20
LAYER_NBYTES = 2 << 20
END_S = 120.0
LISTED_S = 60.0
SIDE_FILE = "config.json"

#: Begins every script: its arguments are ADDRESS COORDINATOR, and what it needs besides.
PREAMBLE = """
import json, sys, time
from dataclasses import replace
import mx
from mx import config
from mx.units import MIB
host, coordinator, *more = sys.argv[1:]
settings = replace(
    config.load(), listen=f"{host}:0", insecure=True, coordinator=coordinator
)
common = dict(coordinator=coordinator, settings=settings)
"""

#: Pulls, and keeps the pull open.
OPEN = """
with mx.pull("m", **common) as pull:
    print(json.dumps(pull.wait().to_json()), flush=True)
    time.sleep(600)
"""

#: Holds some layers of the model under another name, and pulls the rest: BASE WAIT_S. Prints the
#: report and goes on serving, until it is killed.
REUSING = """
base, wait_s = more
with mx.serve(base, model=f"base-{host}", **common) as held:
    pull = mx.pull("m", reuse=held, hold=True, wait_s=float(wait_s), **common)
    with pull:
        report = pull.wait()
        with pull.hold():
            print(json.dumps(report.to_json()), flush=True)
            time.sleep(600)
"""


#: Prints the listing, a line of endpoints and layers each, for each line that it gets.
LISTING = """
for _ in sys.stdin:
    found = mx.list_sources("m", coordinator=coordinator, settings=settings)
    held = {
        each.record.endpoint: sum(end - begin for begin, end in each.record.table.held)
        for each in found
    }
    print(json.dumps(held), flush=True)
"""


class Script(HostCommand):
    """A Python script in one of the hosts."""

    def __init__(self, hosts: Hosts, host: str, script: str, *arguments: str) -> None:
        self.script = PREAMBLE + script
        super().__init__(hosts, host, *arguments)

    def command(self, entry: str) -> list[str]:
        return [*self.prefix, sys.executable, "-c", self.script]

    def fork(
        self, entry: str, arguments: Sequence[str], env: dict[str, str]
    ) -> forkserver.Forked | None:
        return forkserver.coded(self.script, arguments, env, namespace=self.namespace)


@dataclass
class Lan:
    """An origin and, elsewhere, its coordinator; three more hosts around the same switch."""

    hosts: Hosts
    links: dict[str, Link]
    folder: Path
    out: Path
    started: contextlib.ExitStack
    origin: HostCommand
    _asked: subprocess.Popen[str] | None = None

    @property
    def weights(self) -> Path:
        return self.folder / "model.safetensors"

    @property
    def options(self) -> tuple[str, ...]:
        return ("--coordinator", self.coordinator, "--insecure", "--json")

    @property
    def coordinator(self) -> str:
        return f"{self.links[DIRECTORY].address(DIRECTORY)}:7600"

    def pull(self, host: str, *more: str) -> HostCommand:
        listen = ("--listen", f"{self.links[host].address(host)}:0", "--transport", "tcp")
        command = HostCommand(self.hosts, host, "pull", "m", *listen, *self.options, *more)
        self.started.callback(command.end)
        return command

    def script(self, host: str, script: str, *more: str) -> HostCommand:
        address = self.links[host].address(host)
        command = Script(self.hosts, host, script, address, self.coordinator, *more)
        self.started.callback(command.end)
        return command

    def reuse(self, host: str, base: Path, wait_s: float = 0.0) -> HostCommand:
        return self.script(host, REUSING, str(base), str(wait_s))

    def listed(self) -> dict[str, int]:
        """Return how many layers each host's source holds, by the coordinator's list."""
        if self._asked is None:
            self._asked = self.started.enter_context(self._lister())
        asked, answers = self._asked.stdin, self._asked.stdout
        assert asked is not None and answers is not None
        asked.write("\n")
        asked.flush()
        sources = json.loads(answers.readline())
        hosts = {link.address(name): name for name, link in self.links.items()}
        return {hosts[endpoint.partition(":")[0]]: held for endpoint, held in sources.items()}

    @contextlib.contextmanager
    def _lister(self) -> Iterator[subprocess.Popen[str]]:
        """A process beside the coordinator: a new one for each look would use up a core."""
        command = [*self.hosts.prefix(DIRECTORY), sys.executable, "-c", PREAMBLE + LISTING]
        with subprocess.Popen(
            [*command, self.links[DIRECTORY].address(DIRECTORY), self.coordinator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def until_listed(self, command: HostCommand, found: Callable[[dict[str, int]], bool]) -> None:
        seen: dict[str, int] = {}

        def look() -> bool:
            nonlocal seen
            seen = self.listed()
            return found(seen)

        try:
            command.until(look, "such a listing", LISTED_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{seen}") from None

    def stop_origin(self) -> None:
        self.origin.signal(signal.SIGKILL)
        self.origin.wait()

    def until_origin_is_forgotten(self, command: HostCommand) -> None:
        self.until_listed(command, lambda layers: ORIGIN not in layers)

    def check(self, command: HostCommand, out: Path | None = None) -> dict[str, Any]:
        """Check that the pull is complete, and that what it wrote is the whole checkpoint."""
        report = command.json(END_S)
        assert "error" not in report, report
        assert sum(path["bytes"] for path in report["paths"]) == LAYERS * LAYER_NBYTES
        if out is not None:
            assert command.wait() == EXIT_OK, command.err
            assert same(load_file(out / "model.safetensors"), load_file(self.weights))
            assert (out / SIDE_FILE).read_text() == (self.folder / SIDE_FILE).read_text()
        return report

    def check_newcomers(self) -> None:
        """Check that two new pulls get everything, and so does one alone, written or not."""
        for each in [self.pull(host) for host in (SECOND, NEWCOMER)]:
            self.check(each)
        out = self.out / NEWCOMER
        report = self.check(self.pull(NEWCOMER, "--out", str(out)), out)
        origin = self.links[ORIGIN].address(ORIGIN)
        assert all(not path["source"].startswith(f"{origin}:") for path in report["paths"])


def shapes() -> dict[str, tuple[int, ...]]:
    return {
        f"model.layers.{n}.mlp.up_proj.weight": (1024, LAYER_NBYTES // 2048) for n in range(LAYERS)
    }


#: Leases of sources that outlast a test, so that the dead are listed to its end.
LONG_LEASE = pytest.mark.parametrize("lan", ["300"], indirect=True)


@pytest.fixture
def lan(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lan]:
    """Sources are listed for 5 seconds after their death, or as long as the parameter."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_checkpoint(folder / "model.safetensors", shapes())
    (folder / SIDE_FILE).write_text(json.dumps({"architectures": ["None"], "layers": LAYERS}))
    with Hosts() as hosts, contextlib.ExitStack() as started:
        names = (ORIGIN, DIRECTORY, FIRST, SECOND, NEWCOMER)
        links = hosts.star(names, up_mbit_per_s=MBIT_PER_S, down_mbit_per_s=MBIT_PER_S)
        at = f"{links[DIRECTORY].address(DIRECTORY)}:7600"
        daemon = HostCommand(
            hosts, DIRECTORY, "--listen", at, "--insecure",
            "--lease-s", getattr(request, "param", "5"), daemon=True,
        )  # fmt: skip
        started.callback(daemon.end)
        daemon.until(lambda: "listens" in daemon.err, "listening")
        origin = HostCommand(
            hosts, ORIGIN, "serve", str(folder), "--model", "m",
            "--listen", f"{links[ORIGIN].address(ORIGIN)}:0",
            "--coordinator", at, "--insecure", "--json",
        )  # fmt: skip
        started.callback(origin.end)
        origin.json()
        yield Lan(hosts, links, folder, tmp_path, started, origin)


# -- whole holders --------------------------------------------------------------------------------


@pytest.mark.long
def test_a_holder_that_began_alone_gives_everything(lan: Lan) -> None:
    holder = lan.pull(FIRST, "--hold")
    lan.check(holder)
    lan.stop_origin()
    lan.until_origin_is_forgotten(holder)
    assert lan.listed() == {FIRST: LAYERS}
    lan.check_newcomers()


@LONG_LEASE
def test_a_holder_gives_everything_while_the_dead_origin_is_listed(lan: Lan) -> None:
    holder = lan.pull(FIRST, "--hold")
    lan.check(holder)
    lan.until_listed(holder, lambda layers: layers.get(FIRST) == LAYERS)
    lan.stop_origin()
    lan.check_newcomers()


@pytest.mark.long
def test_a_holder_that_was_complete_before_others_could_find_it_gives_everything(lan: Lan) -> None:
    """It becomes a source only when it is complete."""
    for name, link in lan.links.items():
        for end in (name, link.b):
            lan.hosts.throttle(link, None, end)
    holder = lan.pull(FIRST, "--hold")
    lan.check(holder)
    lan.stop_origin()
    lan.until_origin_is_forgotten(holder)
    lan.check_newcomers()


@pytest.mark.long
def test_a_holder_gives_what_it_has_resumed(lan: Lan) -> None:
    out = lan.out / FIRST
    killed = lan.pull(FIRST, "--out", str(out))
    journal = lan.out / f".{FIRST}.mx-partial" / "journal"
    killed.until(
        lambda: journal.exists() and journal.read_bytes().count(b"\n") > 6, "layers written"
    )
    killed.signal(signal.SIGKILL)
    killed.wait()
    holder = lan.pull(FIRST, "--out", str(out), "--hold")
    report = lan.check(holder)
    assert "resume" in {path["transport"] for path in report["paths"]}
    lan.stop_origin()
    lan.until_origin_is_forgotten(holder)
    lan.check_newcomers()


@pytest.mark.long
def test_an_open_pull_that_keeps_nothing_gives_side_files_too(lan: Lan) -> None:
    """It is listed as whole, so a later reader may need them to write its output."""
    holder = lan.script(FIRST, OPEN)
    lan.until_listed(holder, lambda layers: layers.get(FIRST) == LAYERS)
    lan.stop_origin()
    lan.until_origin_is_forgotten(holder)
    lan.check_newcomers()


def some_of(lan: Lan, name: str, layers: range) -> Path:
    """A checkpoint that has these layers in common with the model."""
    from safetensors.torch import save_file

    tensors = load_file(lan.weights)
    found = {
        key: tensor if int(key.split(".")[2]) in layers else tensor + 1
        for key, tensor in tensors.items()
    }
    path = lan.out / f"{name}.safetensors"
    save_file(found, path)
    return path


@pytest.mark.long
def test_a_holder_gives_what_it_has_reused(lan: Lan) -> None:
    holder = lan.reuse(FIRST, some_of(lan, FIRST, range(12)))
    report = lan.check(holder)
    assert "reuse" in {path["transport"] for path in report["paths"]}
    lan.stop_origin()
    lan.until_origin_is_forgotten(holder)
    lan.check_newcomers()


# -- those that hold parts ------------------------------------------------------------------------


@dataclass
class Parts:
    """Two pulls that hold a part each, wait for the rest, and have no path between them."""

    lan: Lan
    holders: dict[str, HostCommand]

    def stop_origin(self, number: int) -> None:
        """Send the origin a signal, and check that it is still listed."""
        self.lan.origin.signal(number)
        assert ORIGIN in self.lan.listed()


#: What each holds of the model; together they hold all of it.
HALVES = {FIRST: range(0, 12), SECOND: range(10, LAYERS)}


def holds_its_part(host: str, listed: dict[str, int]) -> bool:
    return listed.get(host, 0) >= len(HALVES[host])


@pytest.fixture
def parts(lan: Lan) -> Parts:
    # Slow enough that neither is complete for a minute; and no slower, since a queue that takes
    # longer to drain than a ping may take lets only the first of two pulls read anything.
    lan.hosts.throttle(lan.links[ORIGIN], 3, ORIGIN)
    addresses = {host: lan.links[host].address(host) for host in HALVES}
    for host, other in ((FIRST, SECOND), (SECOND, FIRST)):
        blackhole = ("route", "add", "blackhole", f"{addresses[other]}/32")
        subprocess.run(["ip", "-n", lan.hosts.namespace(host), *blackhole], check=True)
    bases = {host: some_of(lan, host, layers) for host, layers in HALVES.items()}
    holders = {host: lan.reuse(host, base, END_S) for host, base in bases.items()}
    for host in HALVES:
        lan.until_listed(holders[host], functools.partial(holds_its_part, host))
    listed = lan.listed()
    assert all(listed[host] < LAYERS for host in HALVES), listed
    return Parts(lan, holders)


@LONG_LEASE
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_parts_make_a_whole_while_the_dead_origin_is_listed(parts: Parts, number: int) -> None:
    lan = parts.lan
    parts.stop_origin(number)
    out = lan.out / NEWCOMER
    report = lan.check(lan.pull(NEWCOMER), None)
    hosts = {path["source"].partition(":")[0] for path in report["paths"]}
    assert {lan.links[host].address(host) for host in HALVES} <= hosts
    lan.check(lan.pull(NEWCOMER, "--out", str(out)), out)


@pytest.mark.long
@LONG_LEASE
@pytest.mark.parametrize("wait_s", [0, 3])
def test_parts_that_are_no_whole_end_it_while_the_dead_origin_is_listed(
    parts: Parts, wait_s: int
) -> None:
    lan = parts.lan
    parts.holders[SECOND].signal(signal.SIGKILL)
    parts.stop_origin(signal.SIGKILL)
    newcomer = lan.pull(NEWCOMER, "--wait", str(wait_s))
    error = newcomer.json(END_S)["error"]
    assert newcomer.wait() == error["exit_code"]
    assert error["exit_code"] in (EXIT_NO_SOURCE, EXIT_INCOMPLETE)
    assert f"after {len(HALVES[FIRST])} of {LAYERS} layers" in error["message"]
    assert "Traceback" not in newcomer.err
