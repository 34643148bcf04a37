"""The identity document: it describes a model's weights, and not how they are carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx.core.canonical import join_binary, write_json, write_names
from mx.core.digest import DIGEST_BYTES
from mx.core.layout import Kind
from mx.core.types import Alias
from mx.errors import ManifestError

IDENTITY_VERSION = 2


def view_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return an alias's strides as records spell them: 1 where no stride is ever taken, since what
    a library says there is an accident."""
    if 0 in shape:
        return (1,) * len(shape)
    return tuple([s if n > 1 else 1 for n, s in zip(shape, stride, strict=True)])


def kind_to_json(kind: Kind) -> list[object]:
    """Return a kind as documents spell it: [dtype, shape], or [dtype, shape, stride]."""
    dtype, shape, stride = kind
    return [dtype, shape, stride] if stride else [dtype, shape]


class IdentityRecords:
    """The canonical tensor records of a layout, independent of its order and places.

    The document is a line of JSON, the names, and the tensors' roots, 32 bytes each. Everything but
    the roots follows from the layout, so `read` accepts a document only if the rest equals this
    layout's byte for byte.
    """

    def __init__(
        self, names: list[str], kinds: Sequence[Kind], kind: list[int], aliases: Sequence[Alias]
    ) -> None:
        """
        Args:
            names: The columns of the layout, as of `build_layout`.
            kinds: See there.
            kind: See there.
            aliases: See there.
        """
        kind_of = dict(zip(names, kind, strict=True))
        used = sorted({kinds[k] for k in set(kind)})
        rank = {k: i for i, k in enumerate(used)}
        rank_of = [rank.get(k, -1) for k in kinds]
        self._names = sorted(names)
        head = {
            "aliases": sorted(
                [a.name, a.target, a.dtype, a.shape, a.offset_bytes, view_stride(a.shape, a.stride)]
                for a in aliases
            ),
            "kind": [rank_of[kind_of[name]] for name in self._names],
            "kinds": [kind_to_json(k) for k in used],
            "version": IDENTITY_VERSION,
        }
        self._head = join_binary(write_json(head), write_names(self._names)) + b"\0"

    def document(self, roots: Mapping[str, bytes]) -> bytes:
        """Return the identity document.

        Args:
            roots: The 32-byte root of each tensor, by name.

        Raises:
            ManifestError: A tensor has no root.
        """
        for name in self._names:
            if len(roots.get(name, b"")) != DIGEST_BYTES:
                raise ManifestError(f"tensor {name!r} has no root")
        return self._head + b"".join(map(roots.__getitem__, self._names))

    def read(self, document: bytes) -> dict[str, bytes]:
        """Return each tensor's root, by name, from a document of unknown origin.

        Raises:
            ManifestError: The document is not one of this layout.
        """
        if not document.startswith(self._head):
            raise ManifestError("the identity document does not describe this layout's tensors")
        raw = document[len(self._head) :]
        step = DIGEST_BYTES
        if len(raw) != step * len(self._names):
            raise ManifestError("the identity document does not have one root per tensor")
        roots = [raw[i : i + step] for i in range(0, len(raw), step)]
        return dict(zip(self._names, roots, strict=True))
