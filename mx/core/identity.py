"""The identity document: it describes a model's weights, and not how they are carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx.core.canonical import join_binary, write_json, write_names
from mx.core.digest import DIGEST_BYTES
from mx.core.layout import Kind, contiguous_strides
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

    Which of several tied names holds the bytes is an accident of how a checkpoint was saved, so
    here it is always the least of the names that view all of them. The document is a line of JSON,
    the names, and the tensors' roots, 32 bytes each. Everything but the roots follows from the
    layout, so `read` accepts a document only if the rest equals this layout's byte for byte.
    """

    def __init__(
        self, names: list[str], kinds: Sequence[Kind], kind: list[int], aliases: Sequence[Alias]
    ) -> None:
        canonical = _canonical_names(names, kinds, kind, aliases)
        holder = {new: old for old, new in canonical.items()}
        renamed = [canonical.get(name, name) for name in names] if canonical else names
        kind_of = dict(zip(renamed, kind, strict=True))
        ordered = sorted(renamed)
        used = sorted({kinds[k] for k in set(kind)})
        rank = {k: i for i, k in enumerate(used)}
        rank_of = [rank.get(k, -1) for k in kinds]
        rows = sorted(
            [
                a.target if canonical.get(a.target) == a.name else a.name,
                canonical.get(a.target, a.target),
                a.dtype,
                a.shape,
                a.offset_bytes,
                view_stride(a.shape, a.stride),
            ]
            for a in aliases
        )
        # The layout's names in the order of the records' roots.
        self._holders = [holder.get(name, name) for name in ordered] if canonical else ordered
        head = {
            "aliases": rows,
            "kind": [rank_of[kind_of[name]] for name in ordered],
            "kinds": [kind_to_json(k) for k in used],
            "version": IDENTITY_VERSION,
        }
        self._head = join_binary(write_json(head), write_names(ordered)) + b"\0"

    def document(self, roots: Mapping[str, bytes]) -> bytes:
        """Return the identity document.

        Args:
            roots: The 32-byte root of each tensor, by name.

        Raises:
            ManifestError: A tensor has no root.
        """
        for name in self._holders:
            if len(roots.get(name, b"")) != DIGEST_BYTES:
                raise ManifestError(f"tensor {name!r} has no root")
        return self._head + b"".join(map(roots.__getitem__, self._holders))

    def read(self, document: bytes) -> dict[str, bytes]:
        """Return each tensor's root, by name, from a document of unknown origin.

        Raises:
            ManifestError: The document is not one of this layout.
        """
        if not document.startswith(self._head):
            raise ManifestError("the identity document does not describe this layout's tensors")
        raw = document[len(self._head) :]
        step = DIGEST_BYTES
        if len(raw) != step * len(self._holders):
            raise ManifestError("the identity document does not have one root per tensor")
        roots = [raw[i : i + step] for i in range(0, len(raw), step)]
        return dict(zip(self._holders, roots, strict=True))


def _canonical_names(
    names: list[str], kinds: Sequence[Kind], kind: list[int], aliases: Sequence[Alias]
) -> dict[str, str]:
    """Map a tensor to the least name that views all of it, where that is not its own name."""
    if not aliases:
        return {}
    kind_of = {name: kinds[k] for name, k in zip(names, kind, strict=True)}
    least: dict[str, str] = {}
    for a in aliases:
        dtype, shape, stride = kind_of[a.target]
        whole = a.offset_bytes == 0 and (a.dtype, a.shape) == (dtype, shape)
        if whole and view_stride(shape, a.stride) == view_stride(
            shape, stride or contiguous_strides(shape)
        ):
            least[a.target] = min(a.name, least.get(a.target, a.target))
    return {target: name for target, name in least.items() if name != target}
