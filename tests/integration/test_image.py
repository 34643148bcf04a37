"""The image's root file system, made by its own scripts and run as a container runs it: read-only,
as its user, with nothing of this machine but the kernel."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.checkpoints import write_checkpoint
from tests.support.cluster import Cluster, check_closed
from tests.support.commands import Command, Run, free_port, serve
from tests.support.daemon import ROOT
from tests.support.deployed import DEPLOY
from tests.support.kubelet import unavailable

MOST_BYTES = 250_000_000
_USER = 65532


def _unavailable() -> str:
    if os.getuid():
        return "root is needed, to make mounts"
    release = Path("/etc/os-release")
    if not release.exists() or 'VERSION_ID="12"' not in release.read_text():
        return "the image is of Debian 12, and so has to be its builder"
    if sys.version_info[:2] != (3, 11):
        return "the image has Python 3.11, and so has to be its builder"
    if not shutil.which("unshare") or not shutil.which("apt-get"):
        return "unshare or apt-get is missing"
    return ""


pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_unavailable()), reason=_unavailable()),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root file system."""
    root = tmp_path_factory.mktemp("image") / "root"
    for script, *arguments in (
        (DEPLOY / "docker/system", root),
        (DEPLOY / "docker/packages", ROOT, root / "app"),
    ):
        made = subprocess.run(
            [script, *arguments],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert made.returncode == 0, made.stderr
    root.parent.chmod(0o755)
    return root


def _entry() -> list[str]:
    """The Dockerfile's entry point."""
    (line,) = re.findall(r"^ENTRYPOINT (.+)$", (DEPLOY / "docker/Dockerfile").read_text(), re.M)
    found: list[str] = json.loads(line)
    return found


def _environment() -> dict[str, str]:
    """What the Dockerfile sets."""
    text = (DEPLOY / "docker/Dockerfile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^ENV (.+)$", text, re.M)
    return dict(word.split("=", 1) for word in line.split())


class Contained(Command):
    """A command in the image, with memory file systems where its volumes would be."""

    _more: tuple[str, ...] = ()

    def __init__(self, image: Path, *words: str, shared: Path | None = None) -> None:
        self._image, self._words, self._shared = image, words, shared
        super().__init__(env=_environment())

    def command(self, entry: str) -> list[str]:
        mounts = [
            'root=$1; shift; mount=/usr/bin/mount; $mount --bind "$root" "$root"',
            '$mount -t proc proc "$root/proc"; $mount --bind /dev "$root/dev"',
            '$mount -t tmpfs tmpfs "$root/tmp"',
            f'$mount -t tmpfs -o uid={_USER},mode=0700 tmpfs "$root/var/lib/mx"',
            f'$mount --bind {self._shared} "$root/run"' if self._shared else ":",
            '$mount -o remount,ro,bind "$root"',
            f'exec /usr/sbin/chroot --userspec={_USER}:{_USER} --groups= "$root" "$@"',
        ]
        unshare = ["/usr/bin/unshare", "-m", "--propagation", "private", *self._more]
        script = "set -e; " + "; ".join(mounts)
        return [*unshare, "/bin/bash", "-c", script, "-", str(self._image), *self._words]


class First(Contained):
    """One that is process 1 of a namespace of its own, as in a container."""

    _more = ("--pid", "--fork")

    def end(self) -> None:
        # unshare's end would leave it: a change of user drops what ties them.
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        if self.process.poll() is None:
            for each in children.read_text().split():
                os.kill(int(each), signal.SIGKILL)
        super().end()

    def first(self, name: str) -> int:
        """Return its process id here, once it is this program."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        found = 0

        def runs() -> bool:
            nonlocal found
            try:
                found = int(children.read_text().split()[0])
                return Path(f"/proc/{found}/comm").read_text().strip() == name
            except (OSError, IndexError):
                return False

        self.until(runs, f"{name} as process 1")
        return found


Start = Callable[..., Contained]


@contextmanager
def containers(image: Path) -> Iterator[Start]:
    """Start commands in the image that end with the block."""
    started: list[Contained] = []

    def start(*words: str, shared: Path | None = None) -> Contained:
        started.append(Contained(image, *words, shared=shared))
        return started[-1]

    try:
        yield start
    finally:
        for each in reversed(started):
            each.end()


def test_it_is_small(image: Path) -> None:
    files = [path for path in image.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    names = {path.name for path in files}
    assert not {"sh", "bash", "dash", "apt-get", "torch"} & names
    assert not (image / "app/torch").exists()
    # Scanners find what is installed.
    assert len(list((image / "var/lib/dpkg/status.d").iterdir())) > 20


def test_it_runs_as_its_user_and_writes_only_to_volumes(image: Path) -> None:
    code = """
import json, os, pathlib
def writes(path):
    try:
        pathlib.Path(path, "new").write_text("")
    except OSError:
        return False
    return True
print(json.dumps({path: writes(path) for path in ("/", "/app", "/etc", "/tmp", "/var/lib/mx")}
                 | {"uid": os.getuid()}))
"""
    with containers(image) as start:
        found = start("python3", "-c", code).json()
        assert found.pop("uid") == _USER
        assert {path for path, can in found.items() if can} == {"/tmp", "/var/lib/mx"}
        doctor = start("mx", "doctor", "--json").json()
    (extras,) = (
        each["text"] for each in doctor["findings"] if each["text"].startswith("installed extras")
    )
    assert extras == "installed extras: redis, metrics, web"
    assert any("is made at first use" in each["text"] for each in doctor["findings"])


def test_a_fleet_of_containers_and_a_cache_that_they_share(
    run: Run, image: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (image / "model").mkdir(exist_ok=True)
    shapes = {f"model.layers.{n}.weight": (256, 256) for n in range(4)}
    write_checkpoint(image / "model/model.safetensors", shapes)
    where = f"127.0.0.1:{free_port()}"
    shared = tmp_path / "run"
    (shared / "mx").mkdir(parents=True)
    os.chown(shared / "mx", _USER, _USER)
    (shared / "mx").chmod(0o700)
    tmp_path.chmod(0o755)
    at = ("--coordinator", where)
    with containers(image) as start:
        coordinator = start("mx-coordinator", "--listen", where)
        coordinator.until(lambda: "listens on" in coordinator.err, "the coordinator")
        source = start("mx", "serve", "/model", "--model", "m", *at, "--json").json()
        pulled = start("mx", "pull", "m", *at, "--out", "/var/lib/mx/m", "--json")
        assert pulled.wait(60) == 0, pulled.err
        assert pulled.json()["pin"] == source["pin"]
        # As with the host's network and process namespaces, and one folder mounted into all.
        socket = ("--cache-socket", "/run/mx/cache.sock")
        cache = start(
            "mx", "serve", "--cache", "--memory", "64MB", *socket, *at, "--json", shared=shared
        )
        cache.json()
        # Of another user, whose memory no process in a container attaches to.
        other = serve(run, checkpoint, "other", where).json()
        attached = start("mx", "pull", "other", *socket, *at, "--json", shared=shared)
        assert attached.wait(60) == 0, attached.err
        (held,) = start("mx", "cache", *socket, "--json", shared=shared).json()["models"]
        assert held["pin"] == other["pin"]
        (path,) = attached.json()["paths"]
        assert (path["transport"], path["source"]) == ("shm-attach", held["endpoint"])


@pytest.mark.skipif(bool(hosts.unavailable()), reason=hosts.unavailable() or "")
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
@pytest.mark.slow  # test_deploy_closed runs the same without the image
def test_the_closed_overlay_runs_in_it(image: Path, tmp_path: Path) -> None:
    with hosts.Hosts() as made:
        cluster = Cluster(made, tmp_path, image)
        try:
            check_closed(cluster)
        finally:
            cluster.close()


def test_a_stop_in_the_first_moments_ends_it(image: Path) -> None:
    """The kernel drops a SIGTERM for a process 1 without a handler, as Python while it imports."""
    command = ("mx-coordinator", "--listen", f"127.0.0.1:{free_port()}")
    alone = First(image, *command)
    try:
        os.kill(alone.first("mx-coordinator"), signal.SIGTERM)
        alone.until(lambda: "listens on" in alone.err, "the coordinator, which was not stopped")
    finally:
        alone.end()
    for _ in range(5):
        started = First(image, *_entry(), *command)
        try:
            first = started.first("tini")
            deadline_s = time.monotonic() + 30
            while not Path(f"/proc/{first}/task/{first}/children").read_text().strip():
                assert time.monotonic() < deadline_s
            os.kill(first, signal.SIGTERM)
            assert started.wait(30) == 128 + signal.SIGTERM
            assert "listens on" not in started.err
        finally:
            started.end()


def test_what_is_installed_is_what_the_lock_has(image: Path) -> None:
    lock = (DEPLOY / "docker/requirements.lock").read_text()
    locked = dict(re.findall(r"^(\S+)==(\S+) ", lock, re.M))
    found = {
        name.lower().replace("_", "-"): version
        for name, version in (
            path.name.removesuffix(".dist-info").rsplit("-", 1)
            for path in (image / "app").glob("*.dist-info")
        )
    }
    found.pop("mx-peer")
    assert found == {name.lower().replace("_", "-"): version for name, version in locked.items()}


def test_other_bytes_of_a_locked_package_are_refused(tmp_path: Path) -> None:
    """As an index would give them that was taken over."""
    shutil.copytree(DEPLOY / "docker", tmp_path / "deploy/docker")
    lock = tmp_path / "deploy/docker/build.lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", lock.read_text()))
    made = subprocess.run(
        [tmp_path / "deploy/docker/packages", tmp_path, tmp_path / "app"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert made.returncode != 0
    assert "HASH" in made.stderr.upper()
    assert not (tmp_path / "app").exists()
