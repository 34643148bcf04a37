"""The coordinators that a client may ask: several addresses, of which one is asked at a time.

They share one state. The one that answers is asked until it does not answer any more; then the next
one is, in turn. All clients of a process remember which one that is, so that an address that is
down is not tried by each of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from mx.errors import ConfigError, CoordinatorError, MxError, PeerProtocolError
from mx.log import Throttle, event
from mx.transport import TlsFiles
from mx.wire.address import each_address
from mx.wire.channel import Remote, Role, dial
from mx.wire.rpc import ClientCall, Stub
from mx.wire.status import foreign, translate
from mx.wire.tls import diagnose
from mx.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_ADDRESSES = 16
#: How long one that does not answer is waited for if there is another one: gRPC notices after about
#: 2.5 s that a connected one has stopped.
ATTEMPT_S = 2.0
#: A coordinator that answers so cannot serve now, and another one may; as one that answers with a
#: bare CoordinatorError, since it does not reach the state.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

#: By the addresses, which of them is asked.
_asked: dict[tuple[str, ...], str] = {}
_said = Throttle()


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One coordinator, and how long a call may take there."""

    remote: Remote
    channel: grpc.aio.Channel
    stub: Stub
    timeout_s: float


#: Asks one coordinator. It may be called again with another one.
Question = Callable[[Link], Awaitable[_T]]


class Coordinators:
    """The coordinators of one client; on its loop. `close` it."""

    def __init__(
        self, addresses: str, *, tls: TlsFiles | None, insecure: bool, timeout_s: float
    ) -> None:
        """
        Args:
            addresses: HOST:PORT or unix:PATH, or several HOST:PORT with commas.
            tls: As for `dial`.
            insecure: As for `dial`.
            timeout_s: The deadline of a call. Where there are several coordinators, that of one
                attempt is 2 s at most.

        Raises:
            ConfigError: As `dial`.
            NotAllowedError: As `dial`.
        """
        self.addresses = each_address(addresses)
        if len(self.addresses) > MAX_ADDRESSES:
            raise ConfigError(
                f"`coordinator` has {len(self.addresses)} addresses",
                hint=f"give {MAX_ADDRESSES} at most",
            )
        service = pb.DESCRIPTOR.services_by_name["Coordinator"]
        if len(self.addresses) > 1:
            timeout_s = min(timeout_s, ATTEMPT_S)
        self._links: dict[str, Link] = {}
        for address in self.addresses:
            remote = Remote(Role.COORDINATOR, address, tls)
            channel = dial(address, tls=tls, insecure=insecure)
            self._links[address] = Link(remote, channel, Stub(channel, service, remote), timeout_s)

    async def close(self) -> None:
        """Cut running calls and close the channels."""
        for link in self._links.values():
            await link.channel.close(None)

    @property
    def current(self) -> Link:
        """The coordinator that is asked now."""
        return self._links[_asked.get(self.addresses, self.addresses[0])]

    def left(self, link: Link, why: str) -> None:
        """Ask the next coordinator from now on: this one does not answer."""
        if len(self.addresses) == 1 or link is not self.current:
            return
        index = self.addresses.index(link.remote.address) + 1
        following = _asked[self.addresses] = self.addresses[index % len(self.addresses)]
        if _said.passes(link.remote.address) is None:
            return
        event(
            log,
            "coordinator.left",
            level=logging.WARNING,
            address=link.remote.address,
            next=following,
            text=f"the coordinator at {link.remote.address} does not answer, and {following} is "
            f"asked now: {why}",
        )

    async def ask(self, question: Question[_T]) -> _T:
        """Return what the coordinator answers; the next one is asked if it does not answer.

        Args:
            question: Asks one.

        Raises:
            CoordinatorError: None answers, or an answer is not valid; the message names those that
                were asked.
            MxError: As `mx.wire.status.translate`, what `question` raises otherwise.
        """
        failed: dict[Link, grpc.RpcError] = {}
        while True:
            link = self._untried(failed)
            try:
                with _valid(link):
                    return await question(link)
            except grpc.RpcError as error:
                await self._next(link, error, failed)

    async def follow(
        self, begin: Callable[[Link], ClientCall], decode: Callable[[Any], _T]
    ) -> AsyncGenerator[_T, None]:
        """Yield the decoded messages of a stream. The next coordinator is asked for it if one does
        not answer at all; a stream that has begun ends with an error, and may be begun again.

        Args:
            begin: Begins the stream at one coordinator.
            decode: Decodes a message.

        Raises:
            MxError: As `ask`.
        """
        failed: dict[Link, grpc.RpcError] = {}
        began = False
        while True:
            link = self._untried(failed)
            call = begin(link)
            try:
                with _valid(link):
                    async for message in call:
                        began = True
                        yield decode(message)
                return
            except grpc.RpcError as error:
                await self._next(link, error, failed, final=began)
            finally:
                call.cancel()

    @asynccontextmanager
    async def using(self) -> AsyncIterator[Link]:
        """Enter a block that talks with the coordinator and translates errors itself; if that does
        not answer, the next one is asked from then on."""
        link = self.current
        try:
            yield link
        except CoordinatorError as error:
            if type(error) is CoordinatorError:
                self.left(link, error.message)
            raise

    def _untried(self, failed: dict[Link, grpc.RpcError]) -> Link:
        first = self.addresses.index(self.current.remote.address)
        turn = self.addresses[first:] + self.addresses[:first]
        return next(link for each in turn if (link := self._links[each]) not in failed)

    async def _next(
        self,
        link: Link,
        error: grpc.RpcError,
        failed: dict[Link, grpc.RpcError],
        *,
        final: bool = False,
    ) -> None:
        """Note that a call failed. Raises what it means unless another coordinator may answer."""
        meant = translate(error, who=link.remote)
        silent = isinstance(error, grpc.aio.AioRpcError) and error.code() in _AWAY
        if not silent and type(meant) is not CoordinatorError:
            raise meant from None
        failed[link] = error
        self.left(link, meant.message)
        if final or len(failed) == len(self.addresses):
            raise await _none_answers(failed) from None


@contextmanager
def _valid(link: Link) -> Iterator[None]:
    """Translate the errors of answers that do not parse, or are not valid."""
    try:
        yield
    except DecodeError as error:
        raise foreign(link.remote, "its answer does not parse") from error
    except PeerProtocolError as error:
        raise CoordinatorError(
            f"the answer of the coordinator at {link.remote.address} is not valid: {error.message}"
        ) from error


async def _none_answers(failed: Mapping[Link, grpc.RpcError]) -> MxError:
    """Return the error for calls that failed at each of these coordinators."""
    found = await asyncio.gather(*(diagnose(e, link.remote) for link, e in failed.items()))
    kinds = {type(each) for each in found}
    if len(found) == 1 or not issubclass(kind := kinds.pop(), CoordinatorError):
        return found[0]
    return (CoordinatorError if kinds else kind)(
        "; ".join(each.message for each in found), hint=found[0].hint
    )
