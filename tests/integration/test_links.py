"""A pull between hosts with several links: all are used, and one that fails costs only itself.

Shares are judged with a wide tolerance: on a busy machine a process's links are not as even as tc
makes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.hosts import Hosts, Link, unavailable
from mx import plugins
from mx.errors import EXIT_INCOMPLETE, EXIT_NO_SOURCE, EXIT_OK
from mx.transport import Unavailable
from tests.support.commands import HostCommand
from tests.support.tensors import same

pytestmark = [pytest.mark.integration, pytest.mark.long]

NEAR, FAR = "near", "far"
LINKS = 4
END_S = 60.0


def transport(name: str) -> Any:
    """A parameter that is skipped where the transport does not work."""
    viable = plugins.transports()[name].probe()
    reason = viable.reason if isinstance(viable, Unavailable) else ""
    return pytest.param(name, marks=pytest.mark.skipif(bool(reason), reason=reason))


@dataclass
class Net:
    """A source in NEAR with its data links to FAR; control has a link of its own."""

    hosts: Hosts
    control: Link
    links: list[Link]
    weights: Path
    transport: str = ""
    used: list[Link] = field(default_factory=list)  # by this test's pulls

    def run(self, host: str, *arguments: str, daemon: bool = False) -> HostCommand:
        return HostCommand(self.hosts, host, *arguments, daemon=daemon)

    @property
    def options(self) -> tuple[str, ...]:
        at = f"{self.control.address(NEAR)}:7600"
        return ("--coordinator", at, "--insecure", "--trusted-fabric", "--json")

    def set(self, mbit_per_s: Sequence[float]) -> None:
        """Use as many links, so fast."""
        self.used = self.links[: len(mbit_per_s)]
        for link, rate in zip(self.used, mbit_per_s, strict=True):
            self.hosts.throttle(link, rate, NEAR)

    def sent(self) -> list[int]:
        return [self.hosts.sent_nbytes(link, NEAR) for link in self.used]

    def carried(self, report: dict[str, Any]) -> list[int]:
        """Return the bytes that the report has for each link."""
        by_rail = {path["rail"]: path["bytes"] for path in report["paths"]}
        rails = [f"{link.device(FAR)}→{link.device(NEAR)}" for link in self.used]
        assert set(by_rail) <= set(rails)
        assert {path["transport"] for path in report["paths"]} == {self.transport}
        return [by_rail.get(rail, 0) for rail in rails]

    def check_output(self, out: Path) -> None:
        assert same(load_file(out / "model.safetensors"), load_file(self.weights))


@pytest.fixture(scope="module")
def lan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    """One source of about 98 MB in 8 layers for all tests."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    weights = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_checkpoint(weights, llama_shapes(6, 768, 2048, 4096))
    with Hosts() as hosts, contextlib.ExitStack() as started:
        control = hosts.link(NEAR, FAR)
        made = Net(hosts, control, [hosts.link(NEAR, FAR) for _ in range(LINKS)], weights)
        at = control.address(NEAR)
        daemon = made.run(NEAR, "--listen", f"{at}:7600", "--insecure", daemon=True)
        started.callback(daemon.end)
        daemon.until(lambda: "listens" in daemon.err, "listening")
        nics = ("--nics", ",".join(link.device(NEAR) for link in made.links))
        serving = ("serve", str(weights), "--model", "m", "--listen", f"{at}:0", *nics)
        source = made.run(NEAR, *serving, *made.options)
        started.callback(source.end)
        source.json()
        yield made


@pytest.fixture(params=[transport("tcp"), transport("ucx")])
def net(lan: Net, request: pytest.FixtureRequest) -> Iterator[Net]:
    """The source, with all links whole again afterwards."""
    lan.transport = request.param
    yield lan
    for link in (lan.control, *lan.links):
        lan.hosts.heal(link)
        lan.hosts.throttle(link, None, NEAR)


Pull = Callable[..., HostCommand]


@pytest.fixture
def pull(net: Net) -> Iterator[Pull]:
    """Begin to pull over the links in use."""
    started: list[HostCommand] = []

    def start(*more: str) -> HostCommand:
        nics = ("--nics", ",".join(link.device(FAR) for link in net.used))
        forced = ("--transport", net.transport)
        started.append(net.run(FAR, "pull", "m", *nics, *forced, *more, *net.options))
        return started[-1]

    yield start
    for command in started:
        command.end()


def under_way(net: Net, pull: Pull, *more: str, nbytes: int = 2_000_000) -> HostCommand:
    """A pull of which every link has carried some."""
    before = net.sent()
    command = pull(*more)
    command.until(
        lambda: all(now - then >= nbytes for now, then in zip(net.sent(), before, strict=True)),
        "bytes on every link",
    )
    assert not command.out, "it ended before anything could happen to it"
    return command


@pytest.mark.parametrize(
    "mbit_per_s",
    [[300], [200, 200], [300, 100], [100, 100, 100, 100], [50, 150, 100, 200]],
    ids=lambda rates: "+".join(map(str, rates)),
)
def test_every_link_carries_its_share(
    net: Net, pull: Pull, mbit_per_s: list[float], tmp_path: Path
) -> None:
    net.set(mbit_per_s)
    before = net.sent()
    report = pull("--out", str(tmp_path / "out")).json(END_S)
    sent = [now - then for now, then in zip(net.sent(), before, strict=True)]
    net.check_output(tmp_path / "out")
    carried = net.carried(report)
    assert sum(carried) == report["bytes"]
    for nbytes, on_wire, rate in zip(carried, sent, mbit_per_s, strict=True):
        assert on_wire >= nbytes  # the interfaces' own counters do not contradict the report
        assert 0.5 <= nbytes / (report["bytes"] * rate / sum(mbit_per_s)) <= 1.75


def break_cut(net: Net, link: Link) -> None:
    net.hosts.cut(link)


def break_mute(net: Net, link: Link) -> None:
    net.hosts.mute(link, NEAR)


def break_throttle(net: Net, link: Link) -> None:
    net.hosts.throttle(link, 1, NEAR)


@pytest.mark.parametrize("how", [break_cut, break_mute, break_throttle])
def test_a_link_that_fails_in_mid_pull_leaves_it_to_the_other(
    net: Net, pull: Pull, how: Callable[[Net, Link], None], tmp_path: Path
) -> None:
    net.set([200, 200])
    command = under_way(net, pull, "--out", str(tmp_path / "out"))
    how(net, net.used[1])
    report = command.json(END_S)
    assert command.wait() == EXIT_OK
    net.check_output(tmp_path / "out")
    whole, broken = net.carried(report)
    assert whole + broken == report["bytes"]
    assert whole > broken
    assert report["retries"] >= 1  # what was on its way over the broken one


def test_when_all_links_are_cut_the_pull_says_so_and_ends(net: Net, pull: Pull) -> None:
    net.set([50, 50])
    command = under_way(net, pull, "--stall-timeout-s", "2")
    for link in (net.control, *net.used):
        net.hosts.cut(link)
    error = command.json(END_S)["error"]
    assert command.wait() in (EXIT_NO_SOURCE, EXIT_INCOMPLETE)
    assert "stopped after" in error["message"]
    assert net.control.address(NEAR) in error["message"]
    assert "Traceback" not in command.err


def test_a_link_that_was_down_before_is_not_waited_for(
    net: Net, pull: Pull, tmp_path: Path
) -> None:
    net.set([200, 200])
    net.hosts.mute(net.used[1], NEAR)
    report = pull("--out", str(tmp_path / "out")).json(END_S)
    net.check_output(tmp_path / "out")
    assert net.carried(report) == [report["bytes"], 0]
