"""Stubs as another program has them: they block, and send what the test gives them, no versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass


def blocking_stub(channel: grpc.Channel, service: ServiceDescriptor) -> Any:
    """Return an object with a callable for each method of the service."""
    made: dict[str, Any] = {}
    for method in service.methods:
        sent = "stream" if method.client_streaming else "unary"
        answered = "stream" if method.server_streaming else "unary"
        made[method.name] = getattr(channel, f"{sent}_{answered}")(
            f"/{service.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
    return SimpleNamespace(**made)
