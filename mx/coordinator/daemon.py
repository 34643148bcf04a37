"""The coordinator as its own process, or embedded in the event loop of another one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import logging
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from mx import keyfile
from mx.coordinator.events import log_changes
from mx.coordinator.service import CoordinatorServicer
from mx.coordinator.state import CoordinatorState, open_state, shared_state
from mx.core.budget import Limits
from mx.core.changes import ChangeKind, Tail
from mx.errors import ConfigError
from mx.log import event
from mx.runtime import uncut
from mx.tasks import end_tasks, require_thread_room
from mx.transport import TlsFiles
from mx.wire.descriptors import raise_limit
from mx.wire.documents import DocumentsServicer
from mx.wire.principals import Access
from mx.wire.server import Listening, Service, listen
from mx.wire.v1 import common_pb2, coordinator_pb2

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7600"
_STOP_GRACE_S = 0.5
#: The objects that are made before the collector looks at them; by default 700.
_YOUNG_OBJECTS = 10_000
#: Of glibc's malloc.h.
_M_ARENA_MAX = -8
_MACHINE_ID = Path("/etc/machine-id")
_RECEIPTS = "mx 2026 coordinator version 1: receipts of bindings"


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """The options of `mx-coordinator`. `state` is as in `open_state`; `lease_s` is in seconds."""

    listen: str = DEFAULT_ADDRESS
    tls: TlsFiles | None = None
    insecure: bool = False
    state: str = "memory"
    #: The settings of packs that are set.
    state_settings: Mapping[str, Any] = field(default_factory=dict)
    #: The file that says who may do what; "" for none.
    policy: str = ""
    lease_s: float = 5.0
    #: What clients may have.
    limits: Limits = field(default_factory=Limits)
    #: The file with the key of its receipts; "" for a key that ends with it.
    receipt_key: str = ""
    #: Where the user has named that file, "" if it is the default one.
    receipt_key_named: str = ""


def receipt_key_of(path: str, named: str, address: str) -> bytes | None:
    """Return the key of a coordinator's receipts, which is made at first use.

    Args:
        path: The file; "" for none.
        named: Where the user has named it; "" if it is the default one. That is in the home folder,
            which hosts may share: on each host it gives another key.
        address: Where the coordinator listens: each address has receipts of its own. Those that
            share a state give the same text.

    Returns:
        The key, or None if it can't be kept, which is said.

    Raises:
        ConfigError: The file is not a key file of this user alone.
    """
    why, level = "there is no file for its key", logging.INFO
    if path:
        key, why = keyfile.kept(Path(path), named=named)
        if not why:
            where = address if named else f"{address} {_host()}"
            return blake3(key + where.encode(), derive_key_context=_RECEIPTS).digest()
        level = logging.WARNING
    text = f"names are not known again after a restart of this coordinator: {why}; name a file"
    event(log, "coordinator.receipts", level=level, text=f"{text} with `receipt_key`")
    return None


def _host() -> str:
    """Return what tells this host from others, also after it has started anew."""
    try:
        found = _MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    return found or socket.gethostname()


class Coordinator:
    """A running coordinator in the current event loop. `start` it once, `stop` it once."""

    def __init__(
        self,
        *,
        lease_s: float = 5.0,
        state: str | CoordinatorState = "memory",
        receipt_key: bytes | None = None,
        access: Access | None = None,
        limits: Limits | None = None,
        state_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            lease_s: How long a source stays listed after a heartbeat, in seconds.
            state: As in `open_state`, or the state, which `stop` closes and whose limits hold.
            receipt_key: By which a later life of this coordinator knows its bindings again
                (`receipt_key_of`); None: none does.
            access: Who may do what; None: everybody everything.
            limits: What clients may have.
            state_settings: See `CoordinatorOptions`.

        Raises:
            ConfigError: An argument is not valid.
        """
        if not 0.1 <= lease_s <= 3600:
            raise ConfigError(
                f"a lease of {lease_s:g} s is not possible", hint="give 0.1 to 3600 seconds"
            )
        if isinstance(state, str):
            state = open_state(
                state,
                lease_s=lease_s,
                limits=limits,
                key=receipt_key,
                settings=state_settings,
            )
        self._state = state
        self.access = access or Access()
        self._servicer = CoordinatorServicer(
            self._state, receipt_key=receipt_key, access=self.access
        )
        self._state.follow(log_changes)
        self._listening: Listening | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def address(self) -> str:
        """The HOST:PORT that it listens on; "" while it does not listen."""
        return self._listening.address if self._listening else ""

    @functools.cached_property
    def figures(self) -> Figures:
        """What it counts for metrics, from the first look on."""
        return Figures(self._state, self._servicer)

    async def start(
        self,
        listen_address: str = DEFAULT_ADDRESS,
        *,
        tls: TlsFiles | None = None,
        insecure: bool = False,
    ) -> str:
        """Listen, and return `address`.

        Args:
            listen_address: HOST:PORT; port 0 for a free one.
            tls: The certificates for mutual TLS.
            insecure: Allow addresses beyond loopback without TLS.

        Raises:
            ConfigError: As `mx.wire.server.listen`.
            LocalError: As `mx.wire.server.listen`.
        """
        await self._state.open()
        # To its end, so that `stop` knows what listens.
        await uncut(self._listen(listen_address, tls, insecure=insecure))
        self._tasks = [
            asyncio.create_task(self._tick(), name="mx-coordinator-tick"),
            asyncio.create_task(self._servicer.forget_silent(), name="mx-coordinator-pulls"),
            asyncio.create_task(self.access.watch(), name="mx-coordinator-policy"),
        ]
        self.access.say()
        event(log, "coordinator.listening", address=self.address, tls=tls is not None)
        return self.address

    async def _listen(self, address: str, tls: TlsFiles | None, *, insecure: bool) -> None:
        coordinator = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        documents = common_pb2.DESCRIPTOR.services_by_name["Documents"]
        self._listening = await listen(
            address,
            [
                Service(
                    coordinator,
                    self._servicer,
                    self._servicer.on_call,
                    self.access.refused_call,
                ),
                Service(
                    documents,
                    DocumentsServicer(self._servicer.documents),
                    lambda context, _: self._servicer.on_documents(context),
                    self.access.refused_call,
                ),
            ],
            tls=tls,
            insecure=insecure,
            access=self.access,
            limits=self._state.limits,
        )

    async def _tick(self) -> None:
        interval_s = min(0.5, self._state.lease_s / 10)
        while True:
            await asyncio.sleep(interval_s)
            await self._state.tick()

    async def stop(self) -> None:
        """End watches and heartbeats, let running calls finish, and release everything."""
        self._servicer.stop()
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        if self._listening is not None:
            listening, self._listening = self._listening, None
            await listening.stop(_STOP_GRACE_S)
            event(log, "coordinator.stopped", address=listening.address)
        await self._state.close()


Beside = Callable[[Coordinator], AbstractContextManager[object]]


def _print_address(address: str) -> None:
    print(f"mx-coordinator listening on {address}", file=sys.stderr, flush=True)


async def _serve(
    options: CoordinatorOptions,
    on_listening: Callable[[str], None],
    beside: Beside,
    on_stopping: Callable[[], None],
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    shared = shared_state(options.state)
    where = (shared and shared.shared_by(options.state)) or options.listen
    key = receipt_key_of(options.receipt_key, options.receipt_key_named, where)
    if key is None and where != options.listen:
        raise ConfigError(
            "coordinators that share a state sign it, and this one has no key to do so",
            hint="give all of them the same file (`receipt_key`)",
        )
    access = Access(options.policy, options.tls, what="coordinator")
    coordinator = Coordinator(
        lease_s=options.lease_s,
        state=options.state,
        receipt_key=key,
        access=access,
        limits=options.limits,
        state_settings=options.state_settings,
    )
    try:
        await coordinator.start(options.listen, tls=options.tls, insecure=options.insecure)
        with beside(coordinator):
            on_listening(coordinator.address)
            await stop.wait()
            on_stopping()
    finally:
        await coordinator.stop()


def _use_one_arena() -> None:
    """Have glibc give memory from one arena. By default each thread of gRPC fills one of its own,
    and what requests have left in one is not there for those of another thread."""
    with contextlib.suppress(AttributeError, OSError):  # another C library has no arenas
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def run(
    options: CoordinatorOptions,
    on_listening: Callable[[str], None] = _print_address,
    beside: Beside = contextlib.nullcontext,
    on_stopping: Callable[[], None] = lambda: None,
) -> int:
    """Run the daemon until SIGTERM or SIGINT. Call this on the main thread.

    Args:
        options: How to run it.
        on_listening: Called with the HOST:PORT that it listens on.
        beside: Returns a context for the coordinator, on its event loop, that is open while it
            listens.
        on_stopping: Called when it has been asked to stop, before it does.

    Returns:
        0, the exit code.

    Raises:
        ConfigError: An option is not valid.
        LocalError: The address cannot be listened on.
    """
    raise_limit()
    _use_one_arena()
    # Little here is garbage that only a collector finds: 20 objects for each call that has ended.
    # To look for it among the objects of a thousand streams stops every call for some 50 ms.
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
    require_thread_room()
    asyncio.run(_serve(options, on_listening, beside, on_stopping))
    return 0


# -- what a coordinator counts for its metrics. It follows the state, as watchers do ---------------


class Figures:
    """The figures of one coordinator, from now on. On its event loop.

    `came` counts the sources that were listed, or came back, `gone` those that left, by reason.
    """

    def __init__(self, state: CoordinatorState, servicer: CoordinatorServicer) -> None:
        """
        Args:
            state: The coordinator's.
            servicer: The coordinator's.
        """
        self.state, self.servicer = state, servicer
        self.gone: Counter[str] = Counter()
        self._name_of: dict[str, str] = {}  # by source
        self._epoch, self._epochs = state.epoch, 0
        self.came = 0
        state.follow(self._on_changes)
        self.came = 0  # those were there

    @property
    def sources(self) -> Counter[str]:
        """How many sources are listed, by the model's name."""
        return Counter(self._name_of.values())

    @property
    def epochs(self) -> int:
        """How often the state's epoch was seen to change."""
        if self.state.epoch != self._epoch:
            self._epoch, self._epochs = self.state.epoch, self._epochs + 1
        return self._epochs

    def _on_changes(self, tail: Tail) -> None:
        _ = self.epochs
        if tail.begins_again:
            there = {change.record.source_id for change in tail.changes}
            for lost in self._name_of.keys() - there:
                del self._name_of[lost]
                self.gone["lost"] += 1
        for change in tail.changes:
            source_id = change.record.source_id
            if change.kind is ChangeKind.GONE:
                del self._name_of[source_id]
                self.gone[change.reason] += 1
            else:
                self.came += source_id not in self._name_of
                self._name_of[source_id] = change.record.model.name
