"""Sets of artefacts between hosts, by the commands: sources and targets that go in mid-set."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.hosts import Hosts, Link
from mx.artifacts import environment
from tests.support import artifact_sets
from tests.support.commands import CHILD_SETTINGS, HostCommand

pytestmark = [pytest.mark.integration, pytest.mark.long]

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
NBYTES = 48 << 20
HERE = environment.here(names=["python", "platform"])


class Site:
    """Two hosts that give a set, one that wants it, around a switch of 100 Mbit/s."""

    def __init__(self, hosts: Hosts, run_in: Callable[..., HostCommand], folder: Path) -> None:
        self._hosts, self._run_in, self._folder = hosts, run_in, folder
        self.links: dict[str, Link] = hosts.star(
            ["first", "second", "target"], up_mbit_per_s=100, down_mbit_per_s=100
        )
        at = self.links["second"].address("second")
        self._coordinator = ("--coordinator", f"{at}:7600", "--insecure", "--json")
        daemon = run_in("second", "--listen", f"{at}:7600", "--insecure", daemon=True)
        daemon.until(lambda: "listening" in daemon.err, "coordinator")
        self.contents = {f"inductor/{n:02}": os.urandom(NBYTES // 12) for n in range(12)}
        self.path = folder / "set.safetensors"
        self.signed = artifact_sets.write(self.path, self.contents, KEY, environment=HERE)
        self.trust = artifact_sets.write_trust(folder / "trust.toml", KEY)

    def serve(self, host: str) -> HostCommand:
        listen = f"{self.links[host].address(host)}:0"
        command = self._run_in(
            host, "serve", "--artifacts", str(self.path), "--listen", listen, *self._coordinator
        )
        command.json()
        return command

    def cache(self) -> HostCommand:
        listen = f"{self.links['target'].address('target')}:0"
        command = self.run(
            *("target", "serve", "--cache", "--memory", "1GB", "--listen", listen),
            *self._coordinator,
        )
        command.json()
        return command

    def run(self, host: str, *arguments: str) -> HostCommand:
        return self._run_in(host, *arguments)

    def pull(self) -> HostCommand:
        return self._run_in(
            *("target", "artifacts", "pull", "m", "--trust", str(self.trust)),
            *("--out", str(self._folder / "root"), *self._coordinator),
        )

    def received(self) -> int:
        return self._hosts.sent_nbytes(self.links["target"], self.links["target"].b)

    def until_received(self, command: HostCommand, nbytes: int) -> None:
        before = self.received()
        command.until(lambda: self.received() - before > nbytes, f"{nbytes} bytes")

    def check(self, command: HostCommand) -> None:
        assert command.wait(90) == 0, command.err
        folder = Path(command.json()["folder"])
        assert folder == self._folder / "root" / self.signed.set_id
        found = {n: (folder / n).read_bytes() for n in self.contents}
        assert found == self.contents
        left = [n for n in os.listdir(folder.parent) if not n.startswith(".lock-")]
        assert left == [self.signed.set_id]


@pytest.fixture
def site(hosts: Hosts, run_in: Callable[..., HostCommand], tmp_path: Path) -> Site:
    return Site(hosts, run_in, tmp_path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_another_source_goes_on_with_a_set(site: Site, how: signal.Signals) -> None:
    first = site.serve("first")
    site.serve("second")
    target = site.pull()
    site.until_received(target, NBYTES // 3)
    first.signal(how)
    try:
        site.check(target)
    finally:
        first.signal(signal.SIGCONT)


@pytest.mark.parametrize("who", ["source", "target"])
def test_the_next_run_goes_on_with_what_has_arrived(site: Site, who: str) -> None:
    first = site.serve("first")
    target = site.pull()
    site.until_received(target, NBYTES // 2)
    (first if who == "source" else target).signal(signal.SIGKILL)
    if who == "source":
        assert target.wait(90) == 3
        said = target.json()
        assert said["folder"] is None and len(said["reasons"]) == 1
        site.serve("second")
    else:
        target.wait()
    root = site.trust.parent / "root"
    assert not (root / site.signed.set_id).exists()
    before = site.received()
    site.check(site.pull())
    assert site.received() - before < 0.8 * NBYTES


def test_targets_that_come_at_once_share_a_folder(site: Site) -> None:
    site.serve("first")
    site.serve("second")
    targets = [site.pull() for _ in range(3)]
    for target in targets:
        target.wait(90)
    for target in targets:
        site.check(target)


def test_the_hosts_cache_holds_a_set(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setitem(CHILD_SETTINGS, "MX_PEER_CACHE_SOCKET", str(tmp_path / "cache.sock"))
    cache = site.cache()
    source = site.serve("first")
    site.check(site.pull())
    assert [each["bytes"] >= NBYTES for each in cache_of(site)] == [True]
    source.signal(signal.SIGKILL)
    source.wait()
    shutil.rmtree(tmp_path / "root")
    before = site.received()
    site.check(site.pull())
    assert site.received() - before < NBYTES // 4
    cache.signal(signal.SIGTERM)
    assert cache.wait() == 0


def cache_of(site: Site) -> list[dict[str, int]]:
    found = site.run("target", "cache", "--json")
    assert found.wait(60) == 0, found.err
    models: list[dict[str, int]] = found.json()["models"]
    return models
