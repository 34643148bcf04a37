"""Digests beside weights: the file `DIGESTS` of a folder, which says what its tensors
hold, block by block. Nothing in it is believed unless a pin, or who else names the model, names its
identity; each page of it then proves itself, as one from a peer does.

The file: `_MAGIC`; the sizes of the identity document and of the layout document, and the layout
version, as little-endian u64; both documents (`mx.core.manifest`); the pages of all layers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from mx.core import manifest as manifests
from mx.core.digest import DIGEST_BYTES, block_digest, document_digest
from mx.core.grid import BLOCK_BYTES
from mx.core.packaging import DIGESTS
from mx.core.pages import Pages, check_page
from mx.core.types import Manifest, ManifestRef
from mx.errors import DigestError, ManifestError, MxError
from mx.storage.osfile import open_regular
from mx.views import HostView, host_view

#: More than the digests of a model of 8 TB, and the documents of 1,000,000 tensors.
MAX_BYTES = 512 << 20
_MAGIC = b"mxdigest1\0\0\0\0\0\0\0"
_HEAD = struct.Struct("<16sQQQ")


def read_beside(folder: Path) -> bytes:
    """Return the file of a folder; b"" if there is none, or it can't be read."""
    try:
        with open(open_regular(folder / DIGESTS), "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, MxError):
        return b""
    return data if len(data) <= MAX_BYTES else b""


class WrittenDigests:
    """The digests of a model while its checkpoint is written."""

    def __init__(
        self,
        manifest: Manifest,
        known: Callable[[int], bytes | None],
        as_stored: bool = False,
    ) -> None:
        """
        Args:
            manifest: The model's.
            known: Returns the page of a layer, by which it was verified; None if it is not known:
                of memory that was attached, or read by the shortcut or by another rank.
            as_stored: Whether it is written as a snapshot, which has all that the model is.
        """
        self._manifest, self._known = manifest, known
        self._pages = [b""] * len(manifest.layout.layers)
        # Else what the files hold is another model, of other aliases or in another order.
        strides = any(tensor.stride for tensor in manifest.layout.tensors)
        is_described = as_stored or (bool(manifest.packaging.files) and not strides)
        pages_nbytes = DIGEST_BYTES * sum(manifest.grid.layer_blocks)
        #: How long the file is; 0: there is to be none.
        self.nbytes = is_described * (_HEAD.size + sum(manifest.ref.sizes[:2]) + pages_nbytes)

    def layer(self, layer: int, view: HostView) -> None:
        """Take a layer that was written.

        Args:
            layer: The layer's index.
            view: The layer's space.

        Raises:
            DigestError: Its bytes are not the model's.
        """
        if not self.nbytes:
            return
        page = self._known(layer)
        if page is None:
            page = b"".join(
                block_digest(host_view(view[at : min(at + BLOCK_BYTES, offset + nbytes)]))
                for offset, nbytes in self._manifest.layout.layers[layer].extents
                for at in range(offset, offset + nbytes, BLOCK_BYTES)
            )
            check_page(self._manifest, layer, page)
        self._pages[layer] = page

    def data(self) -> Iterator[bytes]:
        """Yield the parts of the file, once all layers were taken."""
        ref = self._manifest.ref
        documents = [self._manifest.documents[each] for each in (ref.identity, ref.layout)]
        yield _HEAD.pack(_MAGIC, *map(len, documents), ref.layout_version)
        yield from documents
        yield from self._pages


def decode(data: bytes) -> tuple[Manifest, Pages]:
    """Check a file from anywhere. Returns a manifest without files, and the pages that are right.

    Raises:
        ManifestError: It is malformed.
    """
    if len(data) < _HEAD.size or data[: len(_MAGIC)] != _MAGIC:
        raise ManifestError("this is no file of digests, or one of another release")
    _, identity_nbytes, layout_nbytes, version = _HEAD.unpack_from(data)
    begin = _HEAD.size + identity_nbytes
    end = begin + layout_nbytes
    if end > len(data):
        raise ManifestError("a file of digests ends inside its documents")
    identity, layout = data[_HEAD.size : begin], data[begin:end]
    ref = ManifestRef(
        document_digest(identity),
        document_digest(layout),
        b"",
        (identity_nbytes, layout_nbytes, 0),
        version,
    )
    manifest = manifests.decode(ref, {ref.identity: identity, ref.layout: layout})
    pages, at = Pages(manifest), end
    for layer in pages.missing:
        page = data[at : at + pages.nbytes(layer)]
        at += len(page)
        try:
            check_page(manifest, layer, page)
        except DigestError:
            continue  # it is found by hashing, as one that is not there
        pages.put(layer, page)
    return manifest, pages
