from mx.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SourceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_STATE_UNSPECIFIED: _ClassVar[SourceState]
    SOURCE_STATE_SERVING: _ClassVar[SourceState]
    SOURCE_STATE_DRAINING: _ClassVar[SourceState]

class SourceRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOURCE_ROLE_UNSPECIFIED: _ClassVar[SourceRole]
    SOURCE_ROLE_ORIGIN: _ClassVar[SourceRole]
    SOURCE_ROLE_RELAY: _ClassVar[SourceRole]
SOURCE_STATE_UNSPECIFIED: SourceState
SOURCE_STATE_SERVING: SourceState
SOURCE_STATE_DRAINING: SourceState
SOURCE_ROLE_UNSPECIFIED: SourceRole
SOURCE_ROLE_ORIGIN: SourceRole
SOURCE_ROLE_RELAY: SourceRole

class Source(_message.Message):
    __slots__ = ("model", "manifest", "endpoint", "place", "generation", "role", "state", "table", "transports", "source_id", "source_secret", "keeps_pin", "pin_only", "requests_port", "commitment", "statement", "by_owner", "proof", "nonce", "replaces", "receipt", "variant_fields", "publishes", "certificate", "published_s", "vouch", "notes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SECRET_FIELD_NUMBER: _ClassVar[int]
    KEEPS_PIN_FIELD_NUMBER: _ClassVar[int]
    PIN_ONLY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PORT_FIELD_NUMBER: _ClassVar[int]
    COMMITMENT_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    BY_OWNER_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELDS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    VOUCH_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    manifest: _common_pb2.ManifestRef
    endpoint: str
    place: _common_pb2.Place
    generation: int
    role: SourceRole
    state: SourceState
    table: _common_pb2.AddressTable
    transports: _containers.RepeatedScalarFieldContainer[str]
    source_id: str
    source_secret: bytes
    keeps_pin: bool
    pin_only: bool
    requests_port: int
    commitment: bytes
    statement: bytes
    by_owner: bool
    proof: bytes
    nonce: bytes
    replaces: str
    receipt: bytes
    variant_fields: str
    publishes: bool
    certificate: bytes
    published_s: float
    vouch: bytes
    notes: bytes
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.ManifestRef, _Mapping]] = ..., endpoint: _Optional[str] = ..., place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ..., generation: _Optional[int] = ..., role: _Optional[_Union[SourceRole, str]] = ..., state: _Optional[_Union[SourceState, str]] = ..., table: _Optional[_Union[_common_pb2.AddressTable, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., source_id: _Optional[str] = ..., source_secret: _Optional[bytes] = ..., keeps_pin: bool = ..., pin_only: bool = ..., requests_port: _Optional[int] = ..., commitment: _Optional[bytes] = ..., statement: _Optional[bytes] = ..., by_owner: bool = ..., proof: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., replaces: _Optional[str] = ..., receipt: _Optional[bytes] = ..., variant_fields: _Optional[str] = ..., publishes: bool = ..., certificate: _Optional[bytes] = ..., published_s: _Optional[float] = ..., vouch: _Optional[bytes] = ..., notes: _Optional[bytes] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("source", "page", "mark")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    source: Source
    page: _common_pb2.Page
    mark: bytes
    def __init__(self, source: _Optional[_Union[Source, _Mapping]] = ..., page: _Optional[_Union[_common_pb2.Page, _Mapping]] = ..., mark: _Optional[bytes] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("source_id", "lease_s", "coordinator_epoch", "model", "pin_only", "receipt", "mark", "owner", "published_s")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PIN_ONLY_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_S_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    lease_s: float
    coordinator_epoch: str
    model: _common_pb2.ModelKey
    pin_only: bool
    receipt: bytes
    mark: bytes
    owner: bytes
    published_s: float
    def __init__(self, source_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., coordinator_epoch: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., pin_only: bool = ..., receipt: _Optional[bytes] = ..., mark: _Optional[bytes] = ..., owner: _Optional[bytes] = ..., published_s: _Optional[float] = ...) -> None: ...

class LayoutRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ...) -> None: ...

class LayoutResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class MissingRequest(_message.Message):
    __slots__ = ("digests", "model")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    model: _common_pb2.ModelKey
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ..., model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ...) -> None: ...

class MissingResponse(_message.Message):
    __slots__ = ("digests", "nonce", "vouches")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VOUCHES_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    nonce: bytes
    vouches: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ..., nonce: _Optional[bytes] = ..., vouches: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("source_id", "readers", "gb_per_s", "state", "source_secret", "requests_port", "mark")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PORT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    readers: int
    gb_per_s: float
    state: SourceState
    source_secret: bytes
    requests_port: int
    mark: bytes
    def __init__(self, source_id: _Optional[str] = ..., readers: _Optional[int] = ..., gb_per_s: _Optional[float] = ..., state: _Optional[_Union[SourceState, str]] = ..., source_secret: _Optional[bytes] = ..., requests_port: _Optional[int] = ..., mark: _Optional[bytes] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("lease_s", "coordinator_epoch", "pin_only", "mark", "receipt", "replaces")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIN_ONLY_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    coordinator_epoch: str
    pin_only: bool
    mark: bytes
    receipt: bytes
    replaces: str
    def __init__(self, lease_s: _Optional[float] = ..., coordinator_epoch: _Optional[str] = ..., pin_only: bool = ..., mark: _Optional[bytes] = ..., receipt: _Optional[bytes] = ..., replaces: _Optional[str] = ...) -> None: ...

class AdvertiseRequest(_message.Message):
    __slots__ = ("source_id", "generation", "held", "source_secret")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SECRET_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    generation: int
    held: _containers.RepeatedCompositeFieldContainer[_common_pb2.Range]
    source_secret: bytes
    def __init__(self, source_id: _Optional[str] = ..., generation: _Optional[int] = ..., held: _Optional[_Iterable[_Union[_common_pb2.Range, _Mapping]]] = ..., source_secret: _Optional[bytes] = ...) -> None: ...

class AdvertiseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("source_id", "source_secret", "keeps_name")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SECRET_FIELD_NUMBER: _ClassVar[int]
    KEEPS_NAME_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    source_secret: bytes
    keeps_name: bool
    def __init__(self, source_id: _Optional[str] = ..., source_secret: _Optional[bytes] = ..., keeps_name: bool = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResolveRequest(_message.Message):
    __slots__ = ("name", "revision", "variant", "inline_documents", "serves", "allow_older", "seen")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    INLINE_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OLDER_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    variant: str
    inline_documents: bool
    serves: bool
    allow_older: bool
    seen: bytes
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., variant: _Optional[str] = ..., inline_documents: bool = ..., serves: bool = ..., allow_older: bool = ..., seen: _Optional[bytes] = ...) -> None: ...

class ResolveResponse(_message.Message):
    __slots__ = ("model", "manifest", "sources", "documents", "source_count", "newest", "older", "seen", "vouch")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    OLDER_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    VOUCH_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    manifest: _common_pb2.ManifestRef
    sources: _containers.RepeatedCompositeFieldContainer[Source]
    documents: _containers.RepeatedCompositeFieldContainer[_common_pb2.Page]
    source_count: int
    newest: _common_pb2.ModelKey
    older: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelKey]
    seen: bytes
    vouch: bytes
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.ManifestRef, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[Source, _Mapping]]] = ..., documents: _Optional[_Iterable[_Union[_common_pb2.Page, _Mapping]]] = ..., source_count: _Optional[int] = ..., newest: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., older: _Optional[_Iterable[_Union[_common_pb2.ModelKey, _Mapping]]] = ..., seen: _Optional[bytes] = ..., vouch: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("name", "revision", "pulls", "batches")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    pulls: bool
    batches: bool
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., pulls: bool = ..., batches: bool = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("kind", "source", "reason", "named", "pull", "batch")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[WatchEvent.Kind]
        KIND_SNAPSHOT_END: _ClassVar[WatchEvent.Kind]
        KIND_SOURCE_UP: _ClassVar[WatchEvent.Kind]
        KIND_SOURCE_CHANGED: _ClassVar[WatchEvent.Kind]
        KIND_SOURCE_GONE: _ClassVar[WatchEvent.Kind]
        KIND_LAYERS: _ClassVar[WatchEvent.Kind]
        KIND_NAMED: _ClassVar[WatchEvent.Kind]
        KIND_PULL: _ClassVar[WatchEvent.Kind]
        KIND_PULL_GONE: _ClassVar[WatchEvent.Kind]
    KIND_UNSPECIFIED: WatchEvent.Kind
    KIND_SNAPSHOT_END: WatchEvent.Kind
    KIND_SOURCE_UP: WatchEvent.Kind
    KIND_SOURCE_CHANGED: WatchEvent.Kind
    KIND_SOURCE_GONE: WatchEvent.Kind
    KIND_LAYERS: WatchEvent.Kind
    KIND_NAMED: WatchEvent.Kind
    KIND_PULL: WatchEvent.Kind
    KIND_PULL_GONE: WatchEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    kind: WatchEvent.Kind
    source: Source
    reason: str
    named: _common_pb2.ModelKey
    pull: PullProgress
    batch: _containers.RepeatedCompositeFieldContainer[WatchEvent]
    def __init__(self, kind: _Optional[_Union[WatchEvent.Kind, str]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., reason: _Optional[str] = ..., named: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., pull: _Optional[_Union[PullProgress, _Mapping]] = ..., batch: _Optional[_Iterable[_Union[WatchEvent, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("model", "manifest", "nbytes", "layers", "sources", "pin_only", "restored")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    PIN_ONLY_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.ModelKey
    manifest: _common_pb2.ManifestRef
    nbytes: int
    layers: int
    sources: int
    pin_only: bool
    restored: bool
    def __init__(self, model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.ManifestRef, _Mapping]] = ..., nbytes: _Optional[int] = ..., layers: _Optional[int] = ..., sources: _Optional[int] = ..., pin_only: bool = ..., restored: bool = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class ListSourcesRequest(_message.Message):
    __slots__ = ("name", "pulls")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    pulls: bool
    def __init__(self, name: _Optional[str] = ..., pulls: bool = ...) -> None: ...

class SourceStatus(_message.Message):
    __slots__ = ("source", "lease_left_s", "readers", "gb_per_s")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    source: Source
    lease_left_s: float
    readers: int
    gb_per_s: float
    def __init__(self, source: _Optional[_Union[Source, _Mapping]] = ..., lease_left_s: _Optional[float] = ..., readers: _Optional[int] = ..., gb_per_s: _Optional[float] = ...) -> None: ...

class ListSourcesResponse(_message.Message):
    __slots__ = ("sources", "coordinator_epoch", "pulls")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[SourceStatus]
    coordinator_epoch: str
    pulls: _containers.RepeatedCompositeFieldContainer[PullProgress]
    def __init__(self, sources: _Optional[_Iterable[_Union[SourceStatus, _Mapping]]] = ..., coordinator_epoch: _Optional[str] = ..., pulls: _Optional[_Iterable[_Union[PullProgress, _Mapping]]] = ...) -> None: ...

class ListBundlesRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Bundle(_message.Message):
    __slots__ = ("name", "revision", "variant", "ranks", "missing", "missing_count", "named")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    MISSING_COUNT_FIELD_NUMBER: _ClassVar[int]
    NAMED_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    variant: str
    ranks: int
    missing: _containers.RepeatedScalarFieldContainer[str]
    missing_count: int
    named: bool
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., variant: _Optional[str] = ..., ranks: _Optional[int] = ..., missing: _Optional[_Iterable[str]] = ..., missing_count: _Optional[int] = ..., named: bool = ...) -> None: ...

class ListBundlesResponse(_message.Message):
    __slots__ = ("bundles",)
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    bundles: _containers.RepeatedCompositeFieldContainer[Bundle]
    def __init__(self, bundles: _Optional[_Iterable[_Union[Bundle, _Mapping]]] = ...) -> None: ...

class PullProgress(_message.Message):
    __slots__ = ("pull_id", "model", "host", "pid", "phase", "layers", "ready", "nbytes", "done_bytes", "seconds", "sources", "retries", "gb_per_s", "requests_port", "requests_host", "measured_host")
    class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PHASE_UNSPECIFIED: _ClassVar[PullProgress.Phase]
        PHASE_RUNNING: _ClassVar[PullProgress.Phase]
        PHASE_COMPLETE: _ClassVar[PullProgress.Phase]
        PHASE_FAILED: _ClassVar[PullProgress.Phase]
    PHASE_UNSPECIFIED: PullProgress.Phase
    PHASE_RUNNING: PullProgress.Phase
    PHASE_COMPLETE: PullProgress.Phase
    PHASE_FAILED: PullProgress.Phase
    PULL_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    RETRIES_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PORT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_HOST_FIELD_NUMBER: _ClassVar[int]
    MEASURED_HOST_FIELD_NUMBER: _ClassVar[int]
    pull_id: str
    model: _common_pb2.ModelKey
    host: str
    pid: int
    phase: PullProgress.Phase
    layers: int
    ready: bytes
    nbytes: int
    done_bytes: int
    seconds: float
    sources: _containers.RepeatedScalarFieldContainer[str]
    retries: int
    gb_per_s: float
    requests_port: int
    requests_host: str
    measured_host: str
    def __init__(self, pull_id: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelKey, _Mapping]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., phase: _Optional[_Union[PullProgress.Phase, str]] = ..., layers: _Optional[int] = ..., ready: _Optional[bytes] = ..., nbytes: _Optional[int] = ..., done_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., sources: _Optional[_Iterable[str]] = ..., retries: _Optional[int] = ..., gb_per_s: _Optional[float] = ..., requests_port: _Optional[int] = ..., requests_host: _Optional[str] = ..., measured_host: _Optional[str] = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ("pull",)
    PULL_FIELD_NUMBER: _ClassVar[int]
    pull: PullProgress
    def __init__(self, pull: _Optional[_Union[PullProgress, _Mapping]] = ...) -> None: ...

class ProgressResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pulls(_message.Message):
    __slots__ = ("pulls",)
    PULLS_FIELD_NUMBER: _ClassVar[int]
    pulls: _containers.RepeatedCompositeFieldContainer[PullProgress]
    def __init__(self, pulls: _Optional[_Iterable[_Union[PullProgress, _Mapping]]] = ...) -> None: ...

class ListRatesRequest(_message.Message):
    __slots__ = ("source_hosts",)
    SOURCE_HOSTS_FIELD_NUMBER: _ClassVar[int]
    source_hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, source_hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class Rate(_message.Message):
    __slots__ = ("source_host", "host", "gb_per_s", "age_s")
    SOURCE_HOST_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GB_PER_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    source_host: str
    host: str
    gb_per_s: float
    age_s: float
    def __init__(self, source_host: _Optional[str] = ..., host: _Optional[str] = ..., gb_per_s: _Optional[float] = ..., age_s: _Optional[float] = ...) -> None: ...

class ListRatesResponse(_message.Message):
    __slots__ = ("rates",)
    RATES_FIELD_NUMBER: _ClassVar[int]
    rates: _containers.RepeatedCompositeFieldContainer[Rate]
    def __init__(self, rates: _Optional[_Iterable[_Union[Rate, _Mapping]]] = ...) -> None: ...
