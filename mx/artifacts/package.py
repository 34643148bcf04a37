"""A set of artefacts as a file: the signed document, and the blobs that it describes.

The file is a safetensors file of tensors of bytes: the document, then the blobs, in parts. So a set
is served, listed, pulled and verified as a model's weights are, block by block and from many
sources. Each tensor is a layer: the document arrives first, and a pull that was cut off goes on
from the parts that it has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn

from blake3 import blake3

from mx.artifacts.document import MAX_SET_BYTES, Document
from mx.artifacts.trust import MAX_SIGNED_BYTES, SignedDocument, read_signed
from mx.contexts import OwnContext, Undo
from mx.core.layout import TensorSpec
from mx.errors import ArtifactError, ConfigError
from mx.storage.disk_file import read_tensor_file
from mx.storage.header import header_bytes
from mx.storage.osfile import open_regular, read_error, write_error
from mx.units import MIB

#: The tensor of the document.
DOCUMENT = "set.0.document"
#: The bytes of a tensor of blobs, but for the last one. A set of the most bytes has 2,048.
PART_BYTES = 8 * MIB
_BYTES = "U8"


class ArtifactPackage(OwnContext):
    """A set's file, open for reading. Its document is checked, its signer is not."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ArtifactError: The file is not a set, or its document or signature is wrong.
            CheckpointError: Its header is malformed.
            ConfigError: There is no such file, or this user may not read it.
            LocalError: The disk fails.
        """
        self._path = path
        if not path.exists():
            raise ConfigError(f"there is no file {path}", hint="name one that publish made")
        tensors = read_tensor_file(path, path.name).tensors
        start, end = tensors[0].begin, tensors[0].end
        nbytes = tensors[-1].end - end
        if [each.spec for each in tensors] != [_document(start, end), *_parts(nbytes)]:
            _refuse(path, "it is a checkpoint, or something else")
        if end - start > MAX_SIGNED_BYTES:
            _refuse(path, f"its document has {end - start} bytes")
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise read_error(error, path) from error
        with Undo(self.close):
            self.signed: SignedDocument = read_signed(self._bytes(start, end - start))
            if self.document.nbytes != nbytes:
                _refuse(path, "it is shorter or longer than its document says")
            self._begin, self._offsets = end, self.document.offsets

    @property
    def document(self) -> Document:
        return self.signed.document

    def read(self, blob: int) -> bytes:
        """Return the bytes of a blob, which are checked.

        Args:
            blob: Its number in the document.

        Raises:
            ArtifactError: They are not what the document says.
            LocalError: The disk fails.
        """
        wanted = self.document.blobs[blob]
        data = self._bytes(self._begin + self._offsets[blob], wanted.nbytes)
        if blake3(data).digest() != wanted.blake3:
            self._refuse_blob(blob)
        return data

    def verify(self) -> None:
        """Check the bytes of all blobs, a part at a time. Raises as `read`."""
        for blob, wanted in enumerate(self.document.blobs):
            hasher, begin = blake3(), self._begin + self._offsets[blob]
            for at in range(0, wanted.nbytes, PART_BYTES):
                hasher.update(self._bytes(begin + at, min(PART_BYTES, wanted.nbytes - at)))
            if hasher.digest() != wanted.blake3:
                self._refuse_blob(blob)

    def _refuse_blob(self, blob: int) -> NoReturn:
        _refuse(self._path, f"blob {blob} is not what its document says")

    def _bytes(self, begin: int, nbytes: int) -> bytes:
        parts, left = [], nbytes
        while left:
            try:
                part = os.pread(self._fd, left, begin + nbytes - left)
            except OSError as error:
                raise read_error(error, self._path) from error
            if not part:
                _refuse(self._path, "it was cut while it was read")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write(path: Path, signed: SignedDocument, blobs: Iterable[bytes]) -> None:
    """Write a set's file, which appears whole or not at all.

    Args:
        path: The file to make.
        signed: The set's document.
        blobs: The bytes of each blob, in the order of the document.

    Raises:
        ArtifactError: The bytes are not what the document says.
        ConfigError: There is such a file.
        CapacityError, OutputError: It can't be written.
    """
    specs = [_document(0, len(signed.data)), *_parts(signed.document.nbytes)]
    with _appearing(path) as file:
        file.write(header_bytes(specs, None))
        file.write(signed.data)
        for wanted, data in zip(signed.document.blobs, blobs, strict=True):
            if len(data) != wanted.nbytes or blake3(data).digest() != wanted.blake3:
                _refuse(path, "its files changed while it was made")
            file.write(data)


def _document(begin: int, end: int) -> TensorSpec:
    return TensorSpec(DOCUMENT, _BYTES, (end - begin,))


def _parts(nbytes: int) -> list[TensorSpec]:
    """Return the tensors of blobs that have this many bytes together."""
    return [
        TensorSpec(f"set.{at // PART_BYTES + 1}.blobs", _BYTES, (min(PART_BYTES, nbytes - at),))
        for at in range(0, min(nbytes, MAX_SET_BYTES), PART_BYTES)
    ]


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file, which is put at `path` at the end of the block, and removed on an error."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
    except FileExistsError:
        raise ConfigError(
            f"there is a file {path} already", hint="name another, or remove it first"
        ) from None
    except OSError as error:
        raise write_error(error, path) from error


def _refuse(path: Path, what: str) -> NoReturn:
    raise ArtifactError(
        f"{path} is not a set of artefacts: {what}",
        hint="name a file that `mx artifacts publish` made, or pull it again",
    )
