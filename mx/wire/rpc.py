"""Calls: each begins with the versions of both sides, and messages that do not parse are errors.

gRPC turns a request that does not parse into UNKNOWN and an answer that does not parse into None,
and logs a traceback for both. Here such a message becomes a `MalformedMessage`, which raises on
first use.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from mx.core.versions import answered, headers
from mx.errors import MxError
from mx.wire.status import Remote, check_versions, foreign


class MalformedMessage:
    """A message that did not parse: reading any field of it raises `error()`."""

    def __init__(self, error: Callable[[], MxError]) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error()


def parser(message: Descriptor, error: Callable[[], MxError]) -> Callable[[bytes], Any]:
    """Return a deserialiser for messages of this type that never raises.

    Args:
        message: The type.
        error: Makes the error of the `MalformedMessage` that stands for a message that does not
            parse.
    """
    message_class = GetMessageClass(message)

    def parse(data: bytes) -> Any:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return MalformedMessage(error)

    return parse


class ClientCall:
    """A running call of grpc.aio. Its answer is handed out only if the process that answers speaks
    the versions of this one; else that is an MxError. The rest is as grpc.aio has it."""

    def __init__(self, call: Any, who: Remote) -> None:
        self._call = call
        self._who = who
        self._messages: AsyncIterator[Any] | None = None
        self._is_checked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        answer = await self._call
        initial, trailing = self._call.initial_metadata(), self._call.trailing_metadata()
        check_versions(answered(await initial, await trailing), self._who)
        return answer

    async def read(self) -> Any:
        message = await self._call.read()
        await self._check(ended=message is grpc.aio.EOF)  # type: ignore[attr-defined]
        return message

    def __aiter__(self) -> ClientCall:
        return self

    async def __anext__(self) -> Any:
        if self._messages is None:
            self._messages = aiter(self._call)
        try:
            message = await anext(self._messages)
        except StopAsyncIteration:  # an answer, too
            await self._check(ended=True)
            raise
        await self._check()
        return message

    async def _check(self, *, ended: bool = False) -> None:
        """Check what a stream of answers begins with. Raises MxError."""
        if not self._is_checked:
            initial = await self._call.initial_metadata()
            # Of a call that ends at once grpc.aio may see the end first, and then no beginning.
            trailing = await self._call.trailing_metadata() if ended else ()
            check_versions(answered(initial, trailing), self._who)
            self._is_checked = True


class Stub:
    """A client stub: a callable per method.

    The calls are `ClientCall`s: an answer in other versions is an error. An answer that does not
    parse raises an error on first use.
    """

    def __init__(self, channel: grpc.aio.Channel, service: ServiceDescriptor, who: Remote) -> None:
        """
        Args:
            channel: The channel, which the stub does not own.
            service: The service.
            who: The process at the channel's other end, for errors.
        """
        makers: dict[tuple[bool, bool], Any] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        self._methods: dict[str, Any] = {}
        for method in service.methods:
            make = makers[method.client_streaming, method.server_streaming]
            begin = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=parser(
                    method.output_type, lambda: foreign(who, "its answer does not parse")
                ),
            )
            self._methods[method.name] = functools.partial(self._begin, begin, who)

    @staticmethod
    def _begin(begin: Callable[..., Any], who: Remote, *request: Any, **options: Any) -> ClientCall:
        return ClientCall(begin(*request, metadata=headers(), **options), who)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._methods[name]
        except KeyError:
            raise AttributeError(name) from None
