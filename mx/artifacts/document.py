"""The document of a set of artefacts: what an operator signs, and a target checks. Pure.

All its values are bounded, and it has one valid encoding: reading a document and writing it again
returns the same bytes, so that nothing can be hidden in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NoReturn

from blake3 import blake3
from google.protobuf.message import DecodeError

from mx.artifacts.caches import GRAPHS, MAX_FILES, CacheFile, check_files
from mx.codec import by_name
from mx.core.artifact_names import ID_CHARS, listed_name
from mx.core.reference import parse_reference
from mx.errors import ArtifactError, ConfigError
from mx.text import has_control, shown
from mx.units import GIB, MIB
from mx.wire.v1 import artifacts_pb2 as pb

FORMAT = 1
COMPILE_CACHE = "compile-cache"
CUDA_GRAPH = "cuda-graph"
KINDS = (COMPILE_CACHE, CUDA_GRAPH)

DIGEST_BYTES = 32
MAX_DOCUMENT_BYTES = 32 * MIB
MAX_SET_BYTES = 16 * GIB
MAX_FIELDS = 64
#: A set is listed by a name that has the model's and its own id.
_MAX_NAME_CHARS = 256 - len(listed_name("", ID_CHARS * "0"))
_MAX_VALUE_CHARS = 512
_FIELD = re.compile(r"[a-z][a-z0-9_.]{0,31}", re.ASCII)
_PIN = re.compile(r"[0-9a-f]{64,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of a set. Each has an entry of its own: files with the same bytes share one."""

    blake3: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file of a set. `path` is relative, with "/" between its parts; `blob` numbers its bytes."""

    path: str
    blob: int
    executable: bool = False


@dataclass(frozen=True)
class Document:
    """The document of a set: its purpose and its files.

    `environment` has the fields that a target's environment must agree with. `created_s` is the
    time of its making, in seconds since 1970. `pin` is that of the weights which CUDA graphs are
    for, "" for caches.
    """

    model: str
    kind: str
    created_s: int
    environment: Mapping[str, str]
    blobs: Sequence[Blob]
    files: Sequence[ArtifactFile] = ()
    pin: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of all blobs."""
        return sum(blob.nbytes for blob in self.blobs)

    @property
    def cache_files(self) -> list[CacheFile]:
        """The files, as a cache's folder has them."""
        return [
            CacheFile(each.path, self.blobs[each.blob].nbytes, each.executable)
            for each in self.files
        ]

    @property
    def digests(self) -> list[bytes]:
        """The blake3 of each file."""
        return [self.blobs[each.blob].blake3 for each in self.files]

    @property
    def offsets(self) -> list[int]:
        """Where each blob begins among the bytes of all."""
        return list(accumulate((blob.nbytes for blob in self.blobs), initial=0))[:-1]


def set_id(document: bytes) -> str:
    """Return the id of a set: a digest of its document, which has the digests of all other
    bytes."""
    return blake3(document).hexdigest()[:ID_CHARS]


def encode(document: Document) -> bytes:
    """Return the one encoding of a document.

    Raises:
        ArtifactError: It is not valid; `decode` would refuse it.
    """
    check(document)
    return _message(document).SerializeToString(deterministic=True)


def decode(data: bytes) -> Document:
    """Return the document that untrusted bytes encode.

    Raises:
        ArtifactError: They are not a document in its one encoding, or a value is out of its bounds.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        _refuse(f"its document has {len(data)} bytes, more than {MAX_DOCUMENT_BYTES}")
    try:
        message = pb.ArtifactDocument.FromString(data)
    except DecodeError:
        _refuse("its document is malformed")
    if message.format != FORMAT:
        raise ArtifactError(
            f"a set of artefacts has format {message.format}, and this release reads {FORMAT}",
            hint="publish it with this release of mx",
        )
    _check_counts(len(message.environment), len(message.blobs), len(message.files))
    environment = {each.name: each.value for each in message.environment}
    document = by_name(Document, message, environment=environment)
    check(document)
    if _message(document).SerializeToString(deterministic=True) != data:
        _refuse("its document is not in canonical form")
    return document


def check(document: Document) -> None:
    """Check every value of a document.

    Raises:
        ArtifactError: A value is out of its bounds, or two contradict each other.
    """
    if not _is_name(document.model):
        _refuse(f"it names the model {shown(document.model)}")
    if document.kind not in KINDS:
        _refuse(f"it is of the kind {shown(document.kind)}")
    if not 0 < document.created_s < 1 << 40:
        _refuse("the time of its making is not valid")
    _check_counts(len(document.environment), len(document.blobs), len(document.files))
    for name, value in document.environment.items():
        if not is_field(name, value):
            _refuse(f"its environment has the field {shown(name)}: {shown(value)}")
    if any(len(blob.blake3) != DIGEST_BYTES for blob in document.blobs):
        _refuse("a digest has another length")
    if document.nbytes > MAX_SET_BYTES:
        _refuse(f"it has {document.nbytes} bytes, more than {MAX_SET_BYTES}")
    if len({blob.blake3 for blob in document.blobs}) != len(document.blobs):
        _refuse("it has the same bytes twice")
    if (document.kind == CUDA_GRAPH) != bool(_PIN.fullmatch(document.pin)):
        _refuse("a set has a pin if it is of graphs, and only then")
    _check_files(document)


def _check_counts(fields: int, blobs: int, files: int) -> None:
    if fields > MAX_FIELDS:
        _refuse(f"its environment has more than {MAX_FIELDS} fields")
    if not blobs <= MAX_FILES >= files:
        _refuse(f"it has more than {MAX_FILES} files")


def _check_files(document: Document) -> None:
    if any(each.blob >= len(document.blobs) for each in document.files):
        _refuse("a file names bytes that the set does not have")
    if {each.blob for each in document.files} != set(range(len(document.blobs))):
        _refuse("it has bytes that belong to no file")
    of_graphs = f"{GRAPHS}/{document.pin}/"
    if any(
        each.path.startswith(of_graphs) != bool(document.pin)
        or each.path.startswith(f"{GRAPHS}/") != bool(document.pin)
        for each in document.files
    ):
        _refuse("graphs and caches are in sets of their own")
    if any(first.path >= second.path for first, second in pairwise(document.files)):
        _refuse("its files are not in the order of their paths")
    check_files(document.cache_files)


def is_field(name: str, value: str) -> bool:
    """Return True if a set's environment may have such a field."""
    return _FIELD.fullmatch(name) is not None and _is_text(value, _MAX_VALUE_CHARS)


def _is_name(model: str) -> bool:
    try:
        return (
            model.isprintable()
            and len(model) <= _MAX_NAME_CHARS
            and model == model.strip() != ""
            and parse_reference(model).name == model
        )
    except ConfigError:
        return False


def _is_text(text: str, most: int) -> bool:
    return len(text) <= most and not has_control(text)


def _message(document: Document) -> pb.ArtifactDocument:
    fields = sorted(document.environment.items())
    environment = [pb.EnvironmentField(name=name, value=value) for name, value in fields]
    return by_name(pb.ArtifactDocument, document, format=FORMAT, environment=environment)


def _refuse(what: str) -> NoReturn:
    raise ArtifactError(
        f"a set of artefacts is not valid: {what}", hint="it was not made by `mx artifacts publish`"
    )
