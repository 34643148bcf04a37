"""The calls to a host's cache: the client, and what both sides say. `mx.fleet` answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mx import codec
from mx.contexts import OwnAsyncContext
from mx.core.types import ManifestRef, ModelKey
from mx.errors import PeerTimeoutError
from mx.text import listed
from mx.units import count, format_bytes, format_seconds
from mx.wire.channel import Remote, Role, cut, dial, translating
from mx.wire.rpc import Stub
from mx.wire.status import planned_here
from mx.wire.v1 import cache_pb2 as pb

#: A cache that reports nothing for so long is given up.
SILENT_S = 10.0


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What a client wants held; the fields are those of `HoldRequest`."""

    name: str
    revision: str = ""
    variant: str = ""
    coordinator: str = ""
    offered_at: str = ""
    only_if_held: bool = False


@dataclass(frozen=True, slots=True)
class CachedModelAddress:
    """A model that the cache holds, and the HOST:PORT where it is read."""

    model: ModelKey
    ref: ManifestRef
    endpoint: str


@dataclass(frozen=True, slots=True, repr=False)
class CachedModel:
    """A model in the cache. `in_use` says that processes map or read it, `offered` that it came
    from a process of this host, and that no coordinator knows it. `idle_s` are the seconds since it
    was last asked for, `mapped_by` the number of processes that map it, as far as they are seen."""

    model: ModelKey
    ref: ManifestRef
    endpoint: str
    nbytes: int
    in_use: bool
    offered: bool
    idle_s: float = 0.0
    mapped_by: int = 0

    def __repr__(self) -> str:
        used = f"mapped by {self.mapped_by}, asked for {format_seconds(self.idle_s)} ago"
        return f"<CachedModel {self.model}: {format_bytes(self.nbytes)}, {used}>"


@dataclass(frozen=True, slots=True, repr=False)
class CacheStatus:
    """What a cache holds, least recently used first. `lingering_bytes` are those of models that
    were evicted and that processes still map."""

    budget_bytes: int
    held_bytes: int
    lingering_bytes: int
    evictions: int
    models: tuple[CachedModel, ...]

    def __repr__(self) -> str:
        names = listed([str(each.model) for each in self.models])
        return (
            f"<CacheStatus {format_bytes(self.held_bytes + self.lingering_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, {count(len(self.models), 'model')}"
            f"{': ' * bool(names)}{names}>"
        )


class CacheClient(OwnAsyncContext):
    """A client of the cache behind a unix socket, on the loop; `close` it."""

    def __init__(self, socket: str, *, timeout_s: float) -> None:
        """
        Args:
            socket: The path of the socket.
            timeout_s: How long to wait for the first answer.
        """
        self.remote = Remote(Role.CACHE, f"unix:{socket}")
        self._timeout_s = timeout_s
        self._channel = dial(self.remote.address)
        service = pb.DESCRIPTOR.services_by_name["Cache"]
        self._stub = Stub(self._channel, service, self.remote)

    async def close(self) -> None:
        """Cut running calls and close the channel."""
        await self._channel.close(None)

    async def hold(
        self,
        wanted: WantedModel,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> CachedModelAddress | str:
        """Ask the cache to hold a model, and wait until it does.

        Args:
            wanted: The model.
            on_progress: Called with (bytes so far, bytes in all).

        Returns:
            Where it is, or why the cache does not hold it.

        Raises:
            MxError: The cache does not answer, or refuses; or it holds the model in a layout that
                this process does not plan.
        """
        call = self._stub.Hold(codec.by_name(pb.HoldRequest, wanted))
        answers, timeout_s = aiter(call), self._timeout_s
        try:
            while True:
                with translating(self.remote):
                    async with asyncio.timeout(timeout_s):
                        answer = await anext(answers, None)
                timeout_s = SILENT_S
                if answer is None:
                    return "it ended the call"
                match answer.WhichOneof("event"):
                    case None:
                        pass  # what a later release says besides
                    case "holding":
                        on_progress(answer.holding.done_bytes, answer.holding.nbytes)
                    case "held":
                        key = codec.key_from_wire(answer.held.model)
                        ref = codec.ref_from_wire(answer.held.manifest)
                        planned_here(ref.layout_version, f"the cache holds {key}", self.remote)
                        return CachedModelAddress(key, ref, answer.held.endpoint)
                    case "not_held":
                        return str(answer.not_held.reason)
                    case _:
                        return "its answer is not understood"
        except TimeoutError as error:
            raise PeerTimeoutError(
                f"the cache at {self.remote.address} does not answer", peer=self.remote.address
            ) from error
        finally:
            cut(call)

    async def status(self) -> CacheStatus:
        """Return what the cache holds.

        Raises:
            MxError: The cache does not answer.
        """
        with translating(self.remote):
            answer = await self._stub.Status(pb.CacheStatusRequest(), timeout=self._timeout_s)
        models = tuple(
            codec.by_name(
                CachedModel,
                each,
                model=codec.key_from_wire(each.model),
                ref=codec.ref_from_wire(each.manifest),
            )
            for each in answer.models
        )
        return codec.by_name(CacheStatus, answer, models=models)
