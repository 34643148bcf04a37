from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ArtifactDocument(_message.Message):
    __slots__ = ("format", "model", "kind", "created_s", "environment", "blobs", "files", "pin")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    format: int
    model: str
    kind: str
    created_s: int
    environment: _containers.RepeatedCompositeFieldContainer[EnvironmentField]
    blobs: _containers.RepeatedCompositeFieldContainer[ArtifactBlob]
    files: _containers.RepeatedCompositeFieldContainer[ArtifactFile]
    pin: str
    def __init__(self, format: _Optional[int] = ..., model: _Optional[str] = ..., kind: _Optional[str] = ..., created_s: _Optional[int] = ..., environment: _Optional[_Iterable[_Union[EnvironmentField, _Mapping]]] = ..., blobs: _Optional[_Iterable[_Union[ArtifactBlob, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[ArtifactFile, _Mapping]]] = ..., pin: _Optional[str] = ...) -> None: ...

class EnvironmentField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ArtifactBlob(_message.Message):
    __slots__ = ("blake3", "nbytes")
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    blake3: bytes
    nbytes: int
    def __init__(self, blake3: _Optional[bytes] = ..., nbytes: _Optional[int] = ...) -> None: ...

class ArtifactFile(_message.Message):
    __slots__ = ("path", "blob", "executable")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    path: str
    blob: int
    executable: bool
    def __init__(self, path: _Optional[str] = ..., blob: _Optional[int] = ..., executable: bool = ...) -> None: ...

class SignedArtifact(_message.Message):
    __slots__ = ("document", "public_key", "signature")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    public_key: bytes
    signature: bytes
    def __init__(self, document: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
