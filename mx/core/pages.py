"""Pages: the digests of a layer's blocks, believed only if the roots of its tensors say the same.

A page is the 32-byte digests of all blocks of one layer, in layer order. From any sender it is
right if each tensor's root follows from its part of the page. Pure; not thread-safe unless said.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mx.core.digest import DIGEST_BYTES, tensor_root
from mx.core.grid import block_count
from mx.core.types import Manifest
from mx.errors import DigestError


class Pages:
    """The pages of one model that are known and right. `get` may be called from any thread."""

    def __init__(self, manifest: Manifest, layers: Collection[int] | None = None) -> None:
        """
        Args:
            manifest: The model.
            layers: Those whose pages are needed; None: all.
        """
        self._manifest = manifest
        self._layers = None if layers is None else frozenset(layers)
        self._pages: list[bytes | None] = [None if count else b"" for count in self._counts]

    @property
    def _counts(self) -> Sequence[int]:
        return self._manifest.grid.layer_blocks

    @classmethod
    def whole(cls, manifest: Manifest, pages: Sequence[bytes]) -> Pages:
        """Return pages that this process computed from the bytes, one for each layer."""
        made = cls(manifest)
        made._pages = list(pages)
        return made

    def get(self, layer: int) -> bytes | None:
        """Return a layer's page, None if it is not known."""
        return self._pages[layer]

    def nbytes(self, layer: int) -> int:
        """Return how long a layer's page is."""
        return DIGEST_BYTES * self._counts[layer]

    @property
    def missing(self) -> list[int]:
        """The layers whose pages are needed and not known."""
        return [
            layer
            for layer, page in enumerate(self._pages)
            if page is None and (self._layers is None or layer in self._layers)
        ]

    def put(self, layer: int, page: bytes) -> None:
        """Keep a page that `check_page` found right."""
        self._pages[layer] = page


def check_page(manifest: Manifest, layer: int, page: bytes) -> None:
    """Check a page from anywhere against the roots of its layer's tensors.

    Thread-safe. Costs two microseconds for each tensor, and a second for each 5 GB of digests.

    Args:
        manifest: The manifest; its roots are believed.
        layer: The index of the layer.
        page: The digests, from anywhere.

    Raises:
        DigestError: It is not the page of this layer.
    """
    place = manifest.layout.layers[layer]
    if len(page) != DIGEST_BYTES * manifest.grid.layer_blocks[layer]:
        raise DigestError(f"the block digests of layer {place.name} are {len(page)} bytes long")
    at = 0
    roots = manifest.roots[place.first_tensor : place.first_tensor + len(place.extents)]
    for index, ((_, nbytes), root) in enumerate(zip(place.extents, roots, strict=True)):
        end = at + DIGEST_BYTES * block_count(nbytes)
        if tensor_root(nbytes, page[at:end]) != root:
            name = manifest.layout.tensors[place.first_tensor + index].name
            raise DigestError(
                f"the block digests of tensor {name} do not match the model's identity"
            )
        at = end
