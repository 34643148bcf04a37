from mx.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HoldRequest(_message.Message):
    __slots__ = ("name", "revision", "variant", "coordinator", "offered_at", "only_if_held")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    OFFERED_AT_FIELD_NUMBER: _ClassVar[int]
    ONLY_IF_HELD_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    variant: str
    coordinator: str
    offered_at: str
    only_if_held: bool
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., variant: _Optional[str] = ..., coordinator: _Optional[str] = ..., offered_at: _Optional[str] = ..., only_if_held: bool = ...) -> None: ...

class HoldEvent(_message.Message):
    __slots__ = ("holding", "held", "not_held")
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NOT_HELD_FIELD_NUMBER: _ClassVar[int]
    holding: Holding
    held: Held
    not_held: NotHeld
    def __init__(self, holding: _Optional[_Union[Holding, _Mapping]] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., not_held: _Optional[_Union[NotHeld, _Mapping]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("done_bytes", "nbytes")
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    done_bytes: int
    nbytes: int
    def __init__(self, done_bytes: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("model", "manifest", "endpoint")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    manifest: _common_pb2.ManifestRef
    endpoint: str
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.ManifestRef, _Mapping]] = ..., endpoint: _Optional[str] = ...) -> None: ...

class NotHeld(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class CacheStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CachedModel(_message.Message):
    __slots__ = ("model", "manifest", "endpoint", "nbytes", "in_use", "offered", "idle_s", "mapped_by")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    MAPPED_BY_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    manifest: _common_pb2.ManifestRef
    endpoint: str
    nbytes: int
    in_use: bool
    offered: bool
    idle_s: float
    mapped_by: int
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.ManifestRef, _Mapping]] = ..., endpoint: _Optional[str] = ..., nbytes: _Optional[int] = ..., in_use: bool = ..., offered: bool = ..., idle_s: _Optional[float] = ..., mapped_by: _Optional[int] = ...) -> None: ...

class CacheStatusResponse(_message.Message):
    __slots__ = ("budget_bytes", "held_bytes", "lingering_bytes", "models", "evictions")
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LINGERING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    budget_bytes: int
    held_bytes: int
    lingering_bytes: int
    models: _containers.RepeatedCompositeFieldContainer[CachedModel]
    evictions: int
    def __init__(self, budget_bytes: _Optional[int] = ..., held_bytes: _Optional[int] = ..., lingering_bytes: _Optional[int] = ..., models: _Optional[_Iterable[_Union[CachedModel, _Mapping]]] = ..., evictions: _Optional[int] = ...) -> None: ...
