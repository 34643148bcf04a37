"""A host's cache: `cache` starts it, `cached` says what it holds."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

from mx import config, forks, runtime
from mx.api.closing import Closable, Step
from mx.api.serving import join_or_embed, named_by
from mx.contexts import Undo
from mx.coordinator.daemon import Coordinator
from mx.errors import ConfigError, LocalError
from mx.fleet.cache_keeper import Keeper, require_free_port
from mx.fleet.cache_service import CacheServicer
from mx.memory.budget import available_nbytes
from mx.storage.locks import Lock
from mx.wire.address import is_local, tls_of
from mx.wire.cache import SILENT_S, CacheClient, CacheStatus
from mx.wire.client import CoordinatorClient
from mx.wire.private import cache_socket, make_folder, socket_in_use
from mx.wire.server import Listening, Service, listen
from mx.wire.v1 import cache_pb2

#: How long running calls have when the cache ends.
_LAST_WORDS_S = 0.2


class Cache(Closable):
    """A running cache; `cache` makes it. Close it, or use it as a context manager.

    `socket` is the path where pulls of this host ask it, `coordinator_address` the coordinator that
    it asks.
    """

    def __init__(
        self,
        loop: runtime.LoopThread,
        keeper: Keeper,
        listening: Listening,
        lock: _CacheLock,
        coordinator_address: str,
        embedded: Coordinator | None,
    ) -> None:
        """Take over what `cache` has started."""
        self._keeper = keeper
        self._listening = listening
        self._lock = lock
        self._embedded = embedded
        self._closed = threading.Event()
        self.socket = lock.socket
        self.coordinator_address = coordinator_address
        super().__init__(loop)

    @property
    def embedded(self) -> bool:
        """True if the coordinator runs in this process."""
        return self._embedded is not None

    @property
    def coordinator(self) -> Coordinator | None:
        """The coordinator that runs in this process, if `cache` started one."""
        return self._embedded

    def figures(self) -> dict[str, int]:
        """Return the counts for metrics; on the event loop."""
        return self._keeper.figures()

    def status(self) -> CacheStatus:
        """Return the models that the cache holds."""
        self._require_own()
        return self._loop.run(self._keeper.status())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the cache is closed.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            False if `timeout_s` passed first.
        """
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """Stop answering, and let go of all models. Processes keep what they have attached.

        Idempotent; an interrupted close goes on when it is called again.
        """
        super().close()

    def _closing_steps(self) -> list[Step]:
        embedded = [] if self._embedded is None else [self._awaiting(self._embedded.stop)]
        return [
            self._awaiting(lambda: self._listening.stop(_LAST_WORDS_S)),
            self._awaiting(self._keeper.close),
            *embedded,
            self._lock.release,
            self._closed.set,
        ]

    def forked(self) -> None:
        super().forked()
        self._closed = threading.Event()
        self._closed.set()


class _CacheLock:
    """Makes sure that one cache at a time listens at a socket."""

    def __init__(self, socket: Path) -> None:
        """
        Raises:
            ConfigError: Something else has that path, or nothing can be written there.
            LocalError: Another cache runs there.
        """
        if os.path.lexists(socket) and not _is_socket(socket):
            raise ConfigError(
                f"{socket} is not a socket", hint="name another path with `cache_socket`"
            )
        self.socket = socket
        self._path = socket.with_name(socket.name + ".lock")
        self._file = self._open()
        # A cache that ends removes its lock file: what was opened just before is locked in vain.
        while not self._is_listed():
            self._held.release()
            self._file.close()
            self._file = self._open()

    def _open(self) -> IO[bytes]:
        """Return the lock file, locked."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = open(os.open(self._path, flags, 0o600), "r+b")  # noqa: SIM115 - until `release`
        except OSError as error:
            raise ConfigError(
                f"{self._path} can't be opened: {error.strerror}",
                hint="name another path with `cache_socket`",
            ) from error
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._held = Lock(file.fileno(), f".{self.socket.name}.claim", folder)
        except BlockingIOError as error:
            file.close()
            raise LocalError(
                f"a cache runs at {self.socket} already",
                hint="one is enough; or name another path with `cache_socket`",
            ) from error
        finally:
            os.close(folder)
        return file

    def _is_listed(self) -> bool:
        """Return True if the path still names the file that is locked."""
        try:
            named = self._path.stat(follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._file.fileno()))

    def release(self) -> None:
        """Remove the socket and the lock file, and let another cache listen. Idempotent."""
        if not self._file.closed:
            if _is_socket(self.socket):
                self.socket.unlink(missing_ok=True)
            if self._is_listed():
                self._path.unlink(missing_ok=True)
            self._held.release()
            self._file.close()


def _is_socket(path: Path) -> bool:
    """Return True if a path is a socket itself, no link to one."""
    return path.is_socket() and not path.is_symlink()


forks.recognise(lambda fd, link: link.endswith(".sock.lock"))


def cache(
    *,
    memory: int | str | None = None,
    coordinator: str | None = None,
    embed: bool = True,
    settings: config.Settings | None = None,
) -> Cache:
    """Hold in memory what this host pulls, so that n processes share one copy.

    Each pull of this user on this host asks the cache first: it pulls the model once, and holds it
    for all that attach. Models that no process uses leave it when there is no room, the least
    recently used first.

    Args:
        memory: What all models together may have: "64GB", or bytes. None takes the settings'
            number, by default half of what is free now.
        coordinator: HOST:PORT of the coordinator to ask. None takes the address in the settings; if
            that is the default and no coordinator answers there, embeds one.
        embed: False never embeds a coordinator.
        settings: Settings to use; None loads them from the environment and the files. Their
            `cache_socket` is where it listens.

    Returns:
        The running cache.

    Raises:
        ConfigError: A setting is wrong.
        NotAllowedError: Others may use the folder of its socket.
        LocalError: Another cache runs at that path.
        CoordinatorError: The coordinator does not answer.
    """
    settings = config.given(settings or config.load(), cache_memory=memory)
    if settings.cache_socket == "off":
        raise ConfigError("the settings switch the cache off", hint="leave out `cache_socket=off`")
    require_free_port(settings)
    if settings.policy:  # its pulls read it when others can first read from them
        from mx.wire.principals import Access

        Access(settings.policy, tls_of(settings), what="cache")
    address = coordinator or settings.coordinator
    if is_local(settings.advertise or settings.listen) and not is_local(address):
        raise ConfigError(
            f"the coordinator at {address} is elsewhere, and others can't reach {settings.listen}",
            hint="give `listen=HOST:0` with an address of this machine",
        )
    socket = cache_socket(settings.cache_socket)
    make_folder(socket)

    async def make(loop: runtime.LoopThread) -> Cache:
        lock = _CacheLock(socket)
        with Undo(lock.release):
            return await _start(loop, lock, settings, coordinator, address, embed=embed)

    return runtime.made(make)


async def _start(
    loop: runtime.LoopThread,
    lock: _CacheLock,
    settings: config.Settings,
    coordinator: str | None,
    address: str,
    *,
    embed: bool,
) -> Cache:
    embedded, _ = await join_or_embed(
        address,
        CoordinatorClient.list_models,
        named_by=named_by(coordinator, settings),
        embed=embed,
        wait_s=settings.wait_s,
        settings=settings,
        cancelled=lambda: False,
    )
    listening: list[Listening] = []
    try:
        budget_bytes = settings.value("cache_memory") or available_nbytes() // 2
        keeper = Keeper(settings, address, budget_bytes)
        service = Service(
            cache_pb2.DESCRIPTOR.services_by_name["Cache"],
            CacheServicer(keeper.hold, keeper.status),
        )

        async def listens() -> None:
            listening.append(await listen(f"unix:{lock.socket}", [service]))

        await runtime.uncut(listens())
        return Cache(loop, keeper, listening[0], lock, address, embedded)
    except BaseException:
        for each in listening:
            await runtime.uncut(each.stop(0))
        if embedded is not None:
            await runtime.uncut(embedded.stop())
        raise


def cached(*, settings: config.Settings | None = None) -> CacheStatus | None:
    """Return what this host's cache holds; None if there is no cache.

    Args:
        settings: Settings to use; None loads them from the environment and the files.

    Raises:
        NotAllowedError: Others may use the folder of its socket.
        SourceError: It does not answer.
    """
    settings = settings or config.load()
    where = socket_in_use(settings.cache_socket)
    if not where:
        return None
    timeout_s = max(settings.connect_timeout_s, SILENT_S)  # nothing else waits meanwhile
    return runtime.run(lambda: _status(where, timeout_s))


async def _status(socket: str, timeout_s: float) -> CacheStatus:
    async with CacheClient(socket, timeout_s=timeout_s) as client:
        return await client.status()
