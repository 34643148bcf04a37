"""Turns the process into one of the next release: the wire speaks one version more, every message
has a field more, and every stream that carries several kinds of messages carries one kind more.

`next_layout` adds a layout version as well. Both have to be called before mx opens or serves a
connection.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

#: Field 9000, of a type that has a length: "next".
_UNKNOWN = b"\xc2\xb2\x04\x04next"
#: No kind of watch event that this release knows.
_UNKNOWN_KIND = 99


def next_release() -> None:
    """Speak as the next release does."""
    from mx.core import versions
    from mx.swarm import stream
    from mx.wire import rpc, server

    versions.WIRE_VERSION += 1
    for module in (rpc, server):
        vars(module)["GetMessageClass"] = _Class
    begin, handler, send = rpc.Stub._begin, server._method_handler, stream.PeerStream.send

    def begin_more(call: Any, who: Any, *request: Any, **options: Any) -> Any:
        if request and inspect.isasyncgen(request[0]):
            request = (_followed(request[0]),)
        return begin(call, who, *request, **options)

    def handler_more(method: Any, service: Any, calls: Any, *, is_ours: bool = True) -> Any:
        if is_ours and method.server_streaming and _further(method.output_type) is not None:
            behaviour = _saying_more(getattr(service.servicer, method.name))
            servicer = SimpleNamespace(**{method.name: behaviour})
            service = server.Service(service.descriptor, servicer, service.on_call)
        return handler(method, service, calls, is_ours=is_ours)

    def send_more(self: Any, message: Any) -> None:
        send(self, message)
        send(self, type(message)())

    rpc.Stub._begin = staticmethod(begin_more)  # type: ignore[assignment]
    server._method_handler = handler_more
    stream.PeerStream.send = send_more  # type: ignore[method-assign]


def next_layout() -> None:
    """Plan a layout version more: the layers in reverse order, and other chunks."""
    from mx.core.layout_rules import RULES, LayoutRules, newest

    current = RULES[newest()]
    RULES[newest() + 1] = LayoutRules(
        lambda names, nbytes: current.layers(names, nbytes)[::-1],
        lambda nbytes: 3 << 20,
    )


def an_hour_later() -> None:
    """Have a coordinator name layouts as it does once no older process has called it for long."""
    from mx.core import layout_rules

    layout_rules.IN_USE_S = -1.0


class _Class:
    """Stands for the class of a message: what it writes has unknown fields at every level."""

    def __init__(self, descriptor: Descriptor) -> None:
        self.FromString = GetMessageClass(descriptor).FromString

    @staticmethod
    def SerializeToString(message: Message) -> bytes:
        copy = type(message)()
        copy.CopyFrom(message)
        _extend(copy)
        return copy.SerializeToString()


def _extend(message: Any) -> None:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for each in [value] if isinstance(value, Message) else value:
            _extend(each)
    message.MergeFromString(_UNKNOWN)


def _further(descriptor: Descriptor) -> Message | None:
    """Return a message of a kind that this release does not know, where there are kinds."""
    made: Any = GetMessageClass(descriptor)
    found: Message | None = None
    if descriptor.name == "WatchEvent":
        found = made(batch=[made(kind=_UNKNOWN_KIND)])
    elif [each for each in descriptor.oneofs if len(each.fields) > 1]:
        found = made()
    return found


async def _followed(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        yield message
        further = _further(message.DESCRIPTOR)
        if further is not None:
            yield further


def _saying_more(behaviour: Any) -> Any:
    """Return a method that answers a message more after each one."""

    async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for answer in _followed(behaviour(requests, context)):
            yield answer

    async def write(requests: Any, context: Any) -> None:
        await behaviour(requests, _Context(context))

    return stream if inspect.isasyncgenfunction(behaviour) else write


class _Context:
    """A call's context that writes a message more after each one."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self._context.write(message)
        further = _further(message.DESCRIPTOR)
        if further is not None:
            await self._context.write(further)
