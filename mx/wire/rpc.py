"""Turns messages that do not parse, on either side, into errors of mx.

gRPC turns a request that does not parse into UNKNOWN and an answer that does not parse into None,
and logs a traceback for both. Here such a message becomes a `Malformed`, which raises on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from mx.errors import MxError
from mx.wire.status import Remote, foreign


class Malformed:
    """A message that did not parse: reading any field of it raises `error()`."""

    def __init__(self, error: Callable[[], MxError]) -> None:
        self.error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self.error()


def parser(message: Descriptor, error: Callable[[], MxError]) -> Callable[[bytes], Any]:
    """Return a deserialiser for messages of this type that never raises.

    Args:
        message: The type.
        error: Makes the error of the `Malformed` that stands for a message that does not parse.
    """
    message_class = GetMessageClass(message)

    def parse(data: bytes) -> Any:
        try:
            return message_class.FromString(data)
        except DecodeError:
            return Malformed(error)

    return parse


class Stub:
    """A client stub, as the generated ones: a callable per method.

    An answer that does not parse raises an error on first use.
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
            self._methods[method.name] = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=parser(
                    method.output_type, lambda: foreign(who, "its answer does not parse")
                ),
            )

    def __getattr__(self, name: str) -> Any:
        try:
            return self._methods[name]
        except KeyError:
            raise AttributeError(name) from None
