"""A set of artefacts as a file: the signed document, and the blobs that it describes.

The file is a safetensors file of two tensors of bytes. So a set is served, listed, pulled and
verified as a model's weights are, block by block and from many sources, and the document, which is
its first layer, arrives first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

from blake3 import blake3

from mx.artifacts.document import Document
from mx.artifacts.trust import MAX_SIGNED_BYTES, Signed, read_signed
from mx.core.layout import TensorSpec
from mx.errors import ArtifactError, ConfigError
from mx.storage.disk_file import read_tensor_file
from mx.storage.header import header_bytes
from mx.storage.osfile import open_regular, read_error, write_error

#: The two tensors, which are a layer each.
DOCUMENT, BLOBS = "set.0.document", "set.1.blobs"
_BYTES = "U8"


class Package:
    """A set's file, open for reading. Its document is checked, its signer is not."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            ArtifactError: The file is no set, or its document or signature is wrong.
            CheckpointError: Its header is malformed.
            ConfigError: This user may not read it.
            LocalError: The disk fails.
        """
        self._path = path
        found = {each.spec.name: each for each in read_tensor_file(path, path.name).tensors}
        if found.keys() != {DOCUMENT, BLOBS} or any(
            each.spec.dtype != _BYTES or len(each.spec.shape) != 1 for each in found.values()
        ):
            _refuse(path, "it is a checkpoint, or something else")
        start, end = found[DOCUMENT].begin, found[DOCUMENT].end
        if end - start > MAX_SIGNED_BYTES:
            _refuse(path, f"its document has {end - start} bytes")
        try:
            self._fd = open_regular(path)
        except OSError as error:
            raise read_error(error, path) from error
        try:
            self._begin = found[BLOBS].begin
            self.signed: Signed = read_signed(self._bytes(start, end - start))
            if self.document.nbytes != found[BLOBS].end - self._begin:
                _refuse(path, "it is shorter or longer than its document says")
            self._offsets = self.document.offsets
        except BaseException:
            self.close()
            raise

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
            _refuse(self._path, f"blob {blob} is not what its document says")
        return data

    def verify(self) -> None:
        """Check the bytes of all blobs. Raises as `read`."""
        for blob in range(len(self.document.blobs)):
            self.read(blob)

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write(path: Path, signed: Signed, blobs: Iterable[bytes]) -> None:
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
    nbytes = signed.document.nbytes
    specs = [
        TensorSpec(DOCUMENT, _BYTES, (len(signed.data),)),
        TensorSpec(BLOBS, _BYTES, (nbytes,)),
    ]
    with _appearing(path) as file:
        file.write(header_bytes(specs, None))
        file.write(signed.data)
        for wanted, data in zip(signed.document.blobs, blobs, strict=True):
            if len(data) != wanted.nbytes or blake3(data).digest() != wanted.blake3:
                _refuse(path, "its files changed while it was made")
            file.write(data)


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
