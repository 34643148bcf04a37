"""Places <-> protobuf. A message has the fields of its class in `mx.core.topology`, by their names;
what is absent has the class's default. Places come from other machines, so every field is checked.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, TypeVar

from mx.core.json_bounds import check_json
from mx.core.topology import Fact, Gpu, GpuPeer, Nic, NumaNode, Place
from mx.errors import PeerProtocolError
from mx.wire.v1 import common_pb2 as pb

# Eight GPUs with all their peers and eight interfaces take 5,300 bytes; a registered place, with at
# most one GPU, takes at most 5,700, and some 2,200 more for the facts of a few transports.
_MAX_PLACE_BYTES = 16_384
_MAX_ITEMS = 1024
_MAX_QUANTITY = 1e9
_PARTS = {"nics": Nic, "gpus": Gpu, "peers": GpuPeer, "numa_nodes": NumaNode, "facts": Fact}

_T = TypeVar("_T")


def place_to_wire(place: Place) -> pb.Place:
    """Return the message of a place, without the fields at their defaults."""
    message = pb.Place()
    _fill(message, place)
    return message


def _fill(message: Any, value: Any) -> None:
    for item in fields(value):
        found = getattr(value, item.name)
        if item.name in _PARTS:
            for part in found:
                _fill(getattr(message, item.name).add(), part)
        elif isinstance(found, tuple):
            getattr(message, item.name).extend(found)
        elif found != item.default:
            setattr(message, item.name, found)


def place_from_wire(message: pb.Place) -> Place:
    """Return a place.

    Raises:
        PeerProtocolError: It is too large, has too many items in a list, a text that is not
            printable, or a number that nothing has.
    """
    return _place(message.SerializeToString())


@functools.lru_cache(maxsize=64)  # the same few places arrive again and again
def _place(data: bytes) -> Place:
    if len(data) > _MAX_PLACE_BYTES:
        raise PeerProtocolError(f"place: more than {_MAX_PLACE_BYTES} bytes")
    try:
        return _read(Place, pb.Place.FromString(data))
    except ValueError as error:
        raise PeerProtocolError(f"place: {error}") from error


def place_from_json(text: str) -> Place:
    """Return a place from JSON, as `mx topo --json` prints it. Unknown keys are ignored.

    Raises:
        ValueError: It is malformed, or no place.
    """
    from google.protobuf import json_format

    check_json(text.encode())
    try:
        return _read(Place, json_format.Parse(text, pb.Place(), ignore_unknown_fields=True))
    except json_format.ParseError as error:
        raise ValueError(str(error)) from None


def _read(kind: type[_T], message: Any) -> _T:
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        name = item.name
        found = getattr(message, name)
        if isinstance(item.default, tuple):
            if len(found) > _MAX_ITEMS:
                raise ValueError(f"{name}: more than {_MAX_ITEMS}")
            part = _PARTS.get(name)
            values[name] = tuple(_read(part, e) if part else _checked(name, e) for e in found)
        elif message.HasField(name):
            values[name] = _checked(name, found)
    return kind(**values)


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{name} has characters that can't be printed")
    if isinstance(value, float) and not 0 <= value <= _MAX_QUANTITY:  # refuses NaN too
        raise ValueError(f"{name} is not a quantity")
    if isinstance(value, int) and value < -1:
        raise ValueError(f"{name} is out of range")
    return value
