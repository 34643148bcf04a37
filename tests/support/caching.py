"""A cache, and sources whose memory can't be attached: in a user namespace of their own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mx import api, config
from mx.fleet.caching import cached
from mx.wire.cache import CacheStatus
from tests.support import forkserver
from tests.support.commands import Command, Run, environment

APART = ("unshare", "--user", "--map-root-user")


def unavailable() -> str | None:
    """Return why no process can have a user namespace of its own here, or None if it can."""
    if shutil.which(APART[0]) is None:
        return "needs the command unshare"
    if subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        return "needs the right to make a user namespace"
    return None


class ApartCommand(Command):
    """One of our commands, as another host's: its memory is not attached here."""

    def command(self, entry: str) -> list[str]:
        return [*APART, *super().command(entry)]

    def fork(
        self, entry: str, arguments: Sequence[str], env: dict[str, str]
    ) -> forkserver.Forked | None:
        return forkserver.started(entry, arguments, env, namespace=forkserver.OWN_USERS)


@dataclass(frozen=True)
class Caching:
    """A coordinator's address, and the path of a cache's socket, with its command."""

    coordinator: str
    socket: Path
    start: Callable[..., Command]

    @property
    def settings(self) -> config.Settings:
        """The settings of a process that uses them."""
        return config.load(
            {"coordinator": self.coordinator, "cache_socket": str(self.socket)},
            environ={"HOME": "/nonexistent"},
        )

    @property
    def environment(self) -> dict[str, str]:
        """The same for a child process."""
        return environment(
            MX_PEER_COORDINATOR=self.coordinator, MX_PEER_CACHE_SOCKET=str(self.socket)
        )

    def status(self) -> CacheStatus:
        """What the cache holds."""
        found = cached(settings=self.settings)
        assert found is not None
        return found

    def held(self) -> list[str]:
        """The models that the cache holds, least recently used first."""
        return [str(each.model) for each in self.status().models]

    def pull(self, model: str, **more: object) -> api.Pull:
        """Begin a pull in this process."""
        return api.pull(model, settings=self.settings, **more)  # type: ignore[arg-type]


@contextmanager
def origin(checkpoint: Path, model: str, coordinator: str, *more: str) -> Iterator[Command]:
    """Serve a checkpoint as a host elsewhere does."""
    command = ApartCommand(
        "serve", str(checkpoint), "--model", model, "--coordinator", coordinator, "--json", *more
    )
    try:
        command.json()
        yield command
    finally:
        command.end()


def start_cache(run: Run, coordinator: str, folder: Path, memory: str) -> Caching:
    """Start a cache whose socket is in `folder`."""
    caching = Caching(coordinator, folder / "cache.sock", run)
    run("serve", "--cache", "--memory", memory, "--json", env=caching.environment).json()
    return caching
