"""The coordinator's state: the registry and the documents over a store, with a clock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from mx import packs
from mx.core.budget import Limits
from mx.core.changes import ChangeKind, Tail
from mx.core.documents import Documents
from mx.core.memory_store import MemoryStore
from mx.core.ownership import Receipt
from mx.core.registry import RegisteredSource, Registry
from mx.core.store import Store
from mx.core.types import Registration, SourceRecord
from mx.errors import ConfigError, MxError, PeerProtocolError

_T = TypeVar("_T")

#: The number of leases for which a source stays listed before its first heartbeat: if a thousand
#: register at once, its heartbeat stream waits for the registrations before it.
_FIRST_LEASES = 3

#: How long a question waits for time to pass.
_TICK_S = 1.0

#: Called with what has changed, in order.
Listener = Callable[[Tail], None]


class CoordinatorState:
    """The state of one coordinator. All methods run on one event loop."""

    def __init__(
        self,
        store: Store | None = None,
        *,
        lease_s: float = 5.0,
        grace_s: float = 60.0,
        limits: Limits | None = None,
    ) -> None:
        """
        Args:
            store: Where the state is; None for a new one in memory.
            lease_s: How long a source stays listed after a heartbeat.
            grace_s: How long bindings and documents outlive their last source.
            limits: What clients may have of everything.
        """
        self._store = store or MemoryStore(time.monotonic)
        self.lease_s = lease_s
        self.now = self._store.clock
        self.limits = limits or Limits()
        self._registry = Registry(
            self._store,
            lease_s=lease_s,
            first_lease_s=_FIRST_LEASES * lease_s,
            binding_grace_s=grace_s,
            limits=self.limits,
        )
        self._documents = Documents(
            self._store, limit_nbytes=self.limits.documents_nbytes, grace_s=grace_s
        )
        self._listeners: list[Listener] = []
        #: By source, the address that pays for its documents: the one that it first came from.
        self._payers: dict[str, str] = {}
        #: By document, the names of the models whose listed sources name it.
        self._named: dict[bytes, Counter[str]] = {}
        #: The last entry of the store's stream that has been read; None before the first look.
        self._read: int | None = None
        self._store.subscribe(self._look)
        self._look()

    @property
    def store(self) -> Store:
        """Where the state is."""
        return self._store

    @property
    def epoch(self) -> str:
        """The epoch of the state; it may change."""
        return self._store.epoch

    async def open(self) -> None:
        """Begin.

        Raises:
            MxError: As `Store.open`.
        """
        await self._store.open()

    def follow(self, listener: Listener) -> None:
        """Call `listener` with what there is, and then with every change, on the event loop."""
        listener(self._store.tail(None))
        self._listeners.append(listener)

    async def event(self, apply: Callable[[Registry, float], _T]) -> _T:
        """Apply an event to the registry, at the present time, and return its result.

        Args:
            apply: Calls one of the registry's events. It may run more than once; only the last run
                has taken effect.

        Raises:
            MxError: As the event.
        """
        return await self._store.atomically(lambda: apply(self._registry, self.now()))

    async def ask(self, question: Callable[[Registry], _T]) -> _T:
        """Advance the clock, and return the registry's answer to a question.

        Raises:
            MxError: As the question; or what is known of the state is too old.
        """
        self._store.check()
        with contextlib.suppress(TimeoutError):  # then with what is known
            async with asyncio.timeout(_TICK_S):
                await self.tick()
        return question(self._registry)

    def receipt_of(self, source_id: str) -> Receipt | None:
        """Return what the receipt of a listed source says now; None for none. It reads what is
        known, and is called for each heartbeat."""
        listed = self._store.source(source_id)
        return None if listed is None else self._registry.receipt_of(listed)

    def outdated_by(self, source_id: str) -> str:
        """Return the revision that a listed source has to update; "" for none. As `receipt_of`."""
        listed = self._store.source(source_id)
        return "" if listed is None else self._registry.outdated_by(listed)

    async def tick(self) -> None:
        """Advance the clock. Call this a few times per lease. Where the state cannot be kept,
        nothing ends: the store logs that."""
        with contextlib.suppress(MxError):
            await self.event(Registry.tick)
        self._documents.sweep(self.now())

    async def missing(
        self,
        digests: Sequence[bytes],
        address: str = "",
        known: Callable[[str], bool] | None = None,
    ) -> list[bytes]:
        """Return the documents that a source has to send; the others stay for a while.

        Args:
            digests: The documents of the source.
            address: Who pays for those that nothing else holds.
            known: Says of which models it need not send what is held: with the digest of a document
                of another one it could register that as its own, and read it. None: of all.
        """
        now = self.now()
        theirs = set(digests) if known is None else self.of_models(digests, known)
        return [
            digest
            for digest in digests
            if digest not in theirs or not self._documents.keep(now, digest, address)
        ]

    def of_models(self, digests: Iterable[bytes], sees: Callable[[str], bool]) -> set[bytes]:
        """Return those of these documents that a listed source of a model names that `sees` is true
        of, or what such a name stands for."""
        sees = functools.cache(sees)
        found = {each for each in digests if any(map(sees, self._named.get(each, ())))}
        left = set(digests) - found
        if left:  # of what has no source now
            for name, ref in self._registry.bound():
                here = [digest for digest, _ in ref.documents if digest in left]
                if here and sees(name):
                    found.update(here)
        return found

    def listed(self, name: str) -> list[SourceRecord]:
        """Return the listed sources of a model's name, as of the last event. Not a coroutine, since
        reports of pulls ask it."""
        return self._registry.of_name(name)

    def document(self, digest: bytes) -> bytes | None:
        """Return a held document, or None. Not a coroutine, since it is called for each page."""
        return self._documents.get(digest)

    @property
    def document_bytes(self) -> int:
        """The bytes of the documents that are held, and of those that are being uploaded."""
        return self._documents.used_nbytes

    async def reserve(self, nbytes: int, address: str = "") -> None:
        """Reserve space for documents that are being uploaded from an address.

        Raises:
            CapacityError: The documents would exceed the limit, or that of the address.
        """
        self._documents.reserve(nbytes, address)

    async def unreserve(self, nbytes: int, address: str = "") -> None:
        """Return space that `reserve` reserved."""
        self._documents.unreserve(nbytes, address)

    async def register(
        self,
        registration: Registration,
        documents: Mapping[bytes, bytes],
        *,
        receipt: Receipt | None = None,
        address: str = "",
    ) -> RegisteredSource:
        """List a source, as `Registry.register`, and store the documents of its manifest, which
        the caller has decoded.

        Raises:
            PeerProtocolError: A document of the manifest is neither given nor held, or has another
                size.
            MxError: As `Registry.register`.
        """
        for digest, nbytes in registration.record.documents:
            data = documents.get(digest) or self._documents.get(digest)
            if data is None:
                raise not_sent(digest)
            if len(data) != nbytes:
                raise PeerProtocolError(f"document {digest[:8].hex()} has {len(data)} bytes")
        fresh = [d for d in documents if self._documents.get(d) is None]
        named = {digest for digest, _ in registration.record.documents}
        refused = False
        self._documents.claim(named)
        try:
            for digest in fresh:
                self._documents.put(self.now(), digest, documents[digest], address)
            register = functools.partial(
                Registry.register,
                registration=registration,
                receipt=receipt,
                address=address,
                wall_s=time.time(),
            )
            return await self.event(register)
        except MxError:
            refused = True
            raise
        finally:
            # A caller that is cancelled ends nothing: what it asked for may yet be kept.
            self._documents.unclaim(self.now(), named)
            if refused:
                self._documents.discard(fresh)

    async def close(self) -> None:
        """Release everything."""
        self._listeners.clear()
        await self._store.close()

    def _look(self, begins_again: bool = False) -> None:
        """Follow the store's stream, and report what is new. Documents are held for what is bound,
        and for each listed source, whose files may differ. What comes is held before what goes is
        released."""
        if begins_again:
            self._read = None
        if self._read == self._store.latest:
            return
        tail, now = self._store.tail(self._read), self.now()
        self._read = tail.latest
        if tail.begins_again:
            self._documents.begin(now)
            self._payers.clear()
            self._named.clear()
        named = [(each.ref.documents, each.held, "") for each in tail.answered]
        for change in tail.changes:
            source_id = change.record.source_id
            if change.kind is ChangeKind.UP:
                self._payers[source_id] = change.address
            payer = self._payers[source_id]
            if change.kind is not ChangeKind.GONE:
                named.append((change.record.documents, True, payer))
                self._name(change.record, +1)
            else:
                del self._payers[source_id]
            if change.before is not None:
                named.append((change.before.documents, False, payer))
                self._name(change.before, -1)
        for documents, held, payer in sorted(named, key=lambda each: not each[1]):  # see above
            digests = [digest for digest, _ in documents]
            if held:
                self._documents.adopt(documents, payer)
                self._documents.hold(digests, payer)
            else:
                self._documents.release(now, digests, payer)
        for listener in self._listeners:
            listener(tail)

    def _name(self, record: SourceRecord, change: int) -> None:
        """Count a source more or less that names its documents."""
        for digest, _ in record.documents:
            names = self._named.setdefault(digest, Counter())
            names[record.model.name] += change
            if not names[record.model.name]:
                del names[record.model.name]
            if not names:
                del self._named[digest]


def not_sent(digest: bytes) -> PeerProtocolError:
    """Return the error for a registration that lacks a document."""
    return PeerProtocolError(
        f"document {digest[:8].hex()} of the manifest was not sent",
        hint="call Missing, and send the documents that it names",
    )


class SharedState(Protocol):
    """A kind of state that a pack adds, by the scheme of its URL."""

    def open(
        self,
        url: str,
        *,
        lease_s: float,
        doubt_s: float,
        key: bytes | None,
        settings: Mapping[str, Any],
    ) -> Store:
        """Return the store, which begins with `open`.

        Args:
            url: What `state` is.
            lease_s: How long a source stays listed for which nothing has been heard.
            doubt_s: How long names are in doubt after a loss.
            key: The key by which coordinators sign what they keep where others can write, and know
                it again; None: nothing is signed.
            settings: The settings of packs that are set.

        Raises:
            ConfigError: The URL is wrong, or a library is missing.
        """

    def shared_by(self, url: str) -> str:
        """Return what tells this state from others; "" if it is of one coordinator alone. Those
        that share it believe each other, as far as they have the same key file."""


def shared_state(spec: str) -> SharedState | None:
    """Return the kind of the state that `state` names, if a pack adds it."""
    found: SharedState | None = packs.find("states", spec.partition(":")[0])
    return found


def open_state(
    spec: str,
    *,
    lease_s: float = 5.0,
    limits: Limits | None = None,
    key: bytes | None = None,
    settings: Mapping[str, Any] | None = None,
) -> CoordinatorState:
    """Return the state that `state` names. It begins with `CoordinatorState.open`.

    Args:
        spec: "memory", "sqlite:FILE", or a URL whose scheme a pack adds, as redis://HOST:PORT/DB.
        lease_s: How long a source stays listed after a heartbeat.
        limits: What clients may have of everything.
        key: As for `SharedState.open`, and `settings`.
        settings: The settings of packs that are set.

    Raises:
        ConfigError: It is none of these, or a library is missing.
    """
    kind, _, rest = spec.partition(":")
    store: Store | None = None
    # What a coordinator in memory does not need is not imported.
    if kind == "sqlite" and rest:
        from mx.coordinator.stores.sqlite import SqliteStore

        store = SqliteStore(rest)
    elif spec != "memory":
        shared = shared_state(spec)
        if shared is None:
            raise ConfigError(
                f"`state={kind}` is not a kind of state",
                hint="use `memory`, `sqlite:FILE` or `redis://HOST:PORT/DB`",
            )
        store = shared.open(
            spec,
            lease_s=_FIRST_LEASES * lease_s,
            doubt_s=lease_s,
            key=key,
            settings=settings or {},
        )
    return CoordinatorState(store, lease_s=lease_s, limits=limits)
