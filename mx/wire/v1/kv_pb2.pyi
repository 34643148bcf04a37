from mx.wire.v1 import common_pb2 as _common_pb2
from mx.wire.v1 import peer_pb2 as _peer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvRequest(_message.Message):
    __slots__ = ("hello", "proof", "renewal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    RENEWAL_FIELD_NUMBER: _ClassVar[int]
    hello: KvHello
    proof: KvProof
    renewal: KvRenewal
    def __init__(self, hello: _Optional[_Union[KvHello, _Mapping]] = ..., proof: _Optional[_Union[KvProof, _Mapping]] = ..., renewal: _Optional[_Union[KvRenewal, _Mapping]] = ...) -> None: ...

class KvHello(_message.Message):
    __slots__ = ("name", "nonce", "transports", "place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    nonce: bytes
    transports: _containers.RepeatedScalarFieldContainer[str]
    place: _common_pb2.Place
    def __init__(self, name: _Optional[str] = ..., nonce: _Optional[bytes] = ..., transports: _Optional[_Iterable[str]] = ..., place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ...) -> None: ...

class KvProof(_message.Message):
    __slots__ = ("certificate", "signature")
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    signature: bytes
    def __init__(self, certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class KvRenewal(_message.Message):
    __slots__ = ("confirmed", "wrong")
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    WRONG_FIELD_NUMBER: _ClassVar[int]
    confirmed: int
    wrong: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, confirmed: _Optional[int] = ..., wrong: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("sealed", "challenge", "granted", "changes", "renewed")
    SEALED_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    sealed: bytes
    challenge: KvChallenge
    granted: KvGranted
    changes: KvChanges
    renewed: KvRenewed
    def __init__(self, sealed: _Optional[bytes] = ..., challenge: _Optional[_Union[KvChallenge, _Mapping]] = ..., granted: _Optional[_Union[KvGranted, _Mapping]] = ..., changes: _Optional[_Union[KvChanges, _Mapping]] = ..., renewed: _Optional[_Union[KvRenewed, _Mapping]] = ...) -> None: ...

class KvChallenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: KvProof
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[_Union[KvProof, _Mapping]] = ...) -> None: ...

class KvGranted(_message.Message):
    __slots__ = ("grant_id", "lease_s", "tickets", "region_nbytes", "place", "key", "slots", "first_head", "heads", "layers")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    REGION_NBYTES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    grant_id: str
    lease_s: float
    tickets: _containers.RepeatedCompositeFieldContainer[_peer_pb2.Ticket]
    region_nbytes: _containers.RepeatedScalarFieldContainer[int]
    place: _common_pb2.Place
    key: bytes
    slots: int
    first_head: int
    heads: int
    layers: _containers.RepeatedCompositeFieldContainer[KvRows]
    def __init__(self, grant_id: _Optional[str] = ..., lease_s: _Optional[float] = ..., tickets: _Optional[_Iterable[_Union[_peer_pb2.Ticket, _Mapping]]] = ..., region_nbytes: _Optional[_Iterable[int]] = ..., place: _Optional[_Union[_common_pb2.Place, _Mapping]] = ..., key: _Optional[bytes] = ..., slots: _Optional[int] = ..., first_head: _Optional[int] = ..., heads: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[KvRows, _Mapping]]] = ...) -> None: ...

class KvRows(_message.Message):
    __slots__ = ("region", "begin", "stride", "offsets", "run_nbytes")
    REGION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    RUN_NBYTES_FIELD_NUMBER: _ClassVar[int]
    region: int
    begin: int
    stride: int
    offsets: _containers.RepeatedScalarFieldContainer[int]
    run_nbytes: int
    def __init__(self, region: _Optional[int] = ..., begin: _Optional[int] = ..., stride: _Optional[int] = ..., offsets: _Optional[_Iterable[int]] = ..., run_nbytes: _Optional[int] = ...) -> None: ...

class KvChanges(_message.Message):
    __slots__ = ("number", "blocks", "slots", "digests")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    number: int
    blocks: bytes
    slots: _containers.RepeatedScalarFieldContainer[int]
    digests: bytes
    def __init__(self, number: _Optional[int] = ..., blocks: _Optional[bytes] = ..., slots: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ...) -> None: ...

class KvRenewed(_message.Message):
    __slots__ = ("lease_s",)
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    lease_s: float
    def __init__(self, lease_s: _Optional[float] = ...) -> None: ...
