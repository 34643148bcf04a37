from mx.wire.v1 import common_pb2 as _common_pb2
from mx.wire.v1 import coordinator_pb2 as _coordinator_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[_coordinator_pb2.Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[_coordinator_pb2.Source, _Mapping]]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("source_id", "identity", "generation", "transports", "place", "reader_id", "read_bytes", "wrong_chunks", "grant_id")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRONG_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    identity: bytes
    generation: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    place: _common_pb2.Place
    reader_id: str
    read_bytes: int
    wrong_chunks: _containers.RepeatedScalarFieldContainer[int]
    grant_id: str
    def __init__(self, source_id: _Optional[str] = ..., identity: _Optional[bytes] = ..., generation: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ..., reader_id: _Optional[str] = ..., read_bytes: _Optional[int] = ..., wrong_chunks: _Optional[_Iterable[int]] = ..., grant_id: _Optional[str] = ...) -> None: ...

class OpenEvent(_message.Message):
    __slots__ = ("granted", "renewed", "draining", "stale", "busy", "coordinated", "checked")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    COORDINATED_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    granted: Granted
    renewed: Renewed
    draining: Draining
    stale: Stale
    busy: Busy
    coordinated: Coordinated
    checked: Checked
    def __init__(self, granted: _Optional[_Union[Granted, _Mapping]] = ..., renewed: _Optional[_Union[Renewed, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., stale: _Optional[_Union[Stale, _Mapping]] = ..., busy: _Optional[_Union[Busy, _Mapping]] = ..., coordinated: _Optional[_Union[Coordinated, _Mapping]] = ..., checked: _Optional[_Union[Checked, _Mapping]] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("grant_id", "lease_s", "generation", "tickets", "region_nbytes", "coordinated", "max_bytes_per_s")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    REGION_NBYTES_FIELD_NUMBER: _ClassVar[int]
    COORDINATED_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    grant_id: str
    lease_s: float
    generation: int
    tickets: _containers.RepeatedCompositeFieldContainer[Ticket]
    region_nbytes: _containers.RepeatedScalarFieldContainer[int]
    coordinated: bool
    max_bytes_per_s: float
    def __init__(self, grant_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., generation: _Optional[int] = ..., tickets: _Optional[_Iterable[_Union[Ticket, _Mapping]]] = ..., region_nbytes: _Optional[_Iterable[int]] = ..., coordinated: bool = ..., max_bytes_per_s: _Optional[float] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("transport", "ticket")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    transport: str
    ticket: bytes
    def __init__(self, transport: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("lease_s", "generation", "max_bytes_per_s", "ends_soon")
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_SOON_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    generation: int
    max_bytes_per_s: float
    ends_soon: bool
    def __init__(self, lease_s: _Optional[float] = ..., generation: _Optional[int] = ..., max_bytes_per_s: _Optional[float] = ..., ends_soon: bool = ...) -> None: ...

class Busy(_message.Message):
    __slots__ = ("retry_after_s",)
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    retry_after_s: float
    def __init__(self, retry_after_s: _Optional[float] = ...) -> None: ...

class Coordinated(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Draining(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class Stale(_message.Message):
    __slots__ = ("generation", "changed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    changed: bool
    def __init__(self, generation: _Optional[int] = ..., changed: bool = ...) -> None: ...

class Checked(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    def __init__(self, chunk: _Optional[int] = ...) -> None: ...

class PagesRequest(_message.Message):
    __slots__ = ("identity", "layout", "layers", "batches")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    identity: bytes
    layout: bytes
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Range]
    batches: bool
    def __init__(self, identity: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Range, _Mapping]]] = ..., batches: bool = ...) -> None: ...

class LayerPage(_message.Message):
    __slots__ = ("layer", "offset", "data", "layers")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    offset: int
    data: bytes
    layers: _containers.RepeatedCompositeFieldContainer[_common_pb2.Range]
    def __init__(self, layer: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., layers: _Optional[_Iterable[_Union[_common_pb2.Range, _Mapping]]] = ...) -> None: ...

class SwarmMessage(_message.Message):
    __slots__ = ("hello", "welcome", "have", "request", "allow", "reject", "finished", "cancel", "unchoke", "not_interested", "suggest", "decline", "coordinated", "peers", "interested")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ALLOW_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    UNCHOKE_FIELD_NUMBER: _ClassVar[int]
    NOT_INTERESTED_FIELD_NUMBER: _ClassVar[int]
    SUGGEST_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    COORDINATED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    INTERESTED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    welcome: Welcome
    have: bytes
    request: int
    allow: int
    reject: int
    finished: int
    cancel: int
    unchoke: bool
    not_interested: bool
    suggest: int
    decline: int
    coordinated: bool
    peers: Peers
    interested: bool
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., have: _Optional[bytes] = ..., request: _Optional[int] = ..., allow: _Optional[int] = ..., reject: _Optional[int] = ..., finished: _Optional[int] = ..., cancel: _Optional[int] = ..., unchoke: bool = ..., not_interested: bool = ..., suggest: _Optional[int] = ..., decline: _Optional[int] = ..., coordinated: bool = ..., peers: _Optional[_Union[Peers, _Mapping]] = ..., interested: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("source_id", "own", "have")
    SOURCE_ID_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    source_id: str
    own: _coordinator_pb2.Source
    have: bytes
    def __init__(self, source_id: _Optional[str] = ..., own: _Optional[_Union[_coordinator_pb2.Source, _Mapping]] = ..., have: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("accepted", "have", "seeds", "coordinated")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    COORDINATED_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    have: bytes
    seeds: bool
    coordinated: bool
    def __init__(self, accepted: bool = ..., have: _Optional[bytes] = ..., seeds: bool = ..., coordinated: bool = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("sources",)
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedCompositeFieldContainer[_coordinator_pb2.Source]
    def __init__(self, sources: _Optional[_Iterable[_Union[_coordinator_pb2.Source, _Mapping]]] = ...) -> None: ...
