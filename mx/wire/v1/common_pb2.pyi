from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ModelKey(_message.Message):
    __slots__ = ("name", "revision", "variant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    variant: str
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., variant: _Optional[str] = ...) -> None: ...

class ManifestRef(_message.Message):
    __slots__ = ("identity", "layout", "packaging")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PACKAGING_FIELD_NUMBER: _ClassVar[int]
    identity: DocumentRef
    layout: DocumentRef
    packaging: DocumentRef
    def __init__(self, identity: _Optional[_Union[DocumentRef, _Mapping]] = ..., layout: _Optional[_Union[DocumentRef, _Mapping]] = ..., packaging: _Optional[_Union[DocumentRef, _Mapping]] = ...) -> None: ...

class DocumentRef(_message.Message):
    __slots__ = ("digest", "nbytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    nbytes: int
    def __init__(self, digest: _Optional[bytes] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ("digest", "offset", "nbytes", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    nbytes: int
    data: bytes
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., nbytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AddressTable(_message.Message):
    __slots__ = ("layout_digest", "regions", "held", "rows", "layers", "payload_bytes")
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    layout_digest: bytes
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    held: _containers.RepeatedCompositeFieldContainer[Range]
    rows: int
    layers: int
    payload_bytes: int
    def __init__(self, layout_digest: _Optional[bytes] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., held: _Optional[_Iterable[_Union[Range, _Mapping]]] = ..., rows: _Optional[int] = ..., layers: _Optional[int] = ..., payload_bytes: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("index", "device", "base", "nbytes", "layers")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    index: int
    device: str
    base: int
    nbytes: int
    layers: Range
    def __init__(self, index: _Optional[int] = ..., device: _Optional[str] = ..., base: _Optional[int] = ..., nbytes: _Optional[int] = ..., layers: _Optional[_Union[Range, _Mapping]] = ...) -> None: ...

class Range(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class TableRows(_message.Message):
    __slots__ = ("layer", "offset", "nbytes", "region", "region_offset")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    REGION_OFFSET_FIELD_NUMBER: _ClassVar[int]
    layer: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    region: _containers.RepeatedScalarFieldContainer[int]
    region_offset: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., nbytes: _Optional[_Iterable[int]] = ..., region: _Optional[_Iterable[int]] = ..., region_offset: _Optional[_Iterable[int]] = ...) -> None: ...
