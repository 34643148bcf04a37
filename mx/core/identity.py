"""The identity document: what a model's weights are, and nothing about how they are carried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mx.core.canonical import join_binary, write_json, write_names
from mx.core.layout import Kind, contiguous_strides
from mx.core.types import Alias
from mx.errors import ManifestError

TENSOR_DIGEST_BYTES = 32
IDENTITY_VERSION = 1


class IdentityRecords:
    """The canonical tensor records of a layout, which its order and places do not change.

    Which of several tied names holds the bytes is an accident of how a checkpoint was saved, so
    here it is always the least of those that view them whole. The document is a line of JSON,
    the names, and the digests, 32 bytes each; all but the digests follows from the layout, so a
    document is believed only if it is byte for byte the one that this layout has.
    """

    def __init__(
        self, names: list[str], kinds: Sequence[Kind], kind: list[int], aliases: Sequence[Alias]
    ) -> None:
        bearer = _bearers(names, kinds, kind, aliases)
        holder = {new: old for old, new in bearer.items()}
        borne = [bearer.get(name, name) for name in names] if bearer else names
        kind_of = dict(zip(borne, kind, strict=True))
        ordered = sorted(borne)
        used = sorted({kinds[k] for k in set(kind)})
        rank = {k: i for i, k in enumerate(used)}
        rank_of = [rank.get(k, -1) for k in kinds]
        rows = sorted(
            [
                a.target if bearer.get(a.target) == a.name else a.name,
                bearer.get(a.target, a.target),
                a.dtype,
                a.shape,
                a.offset_bytes,
                a.stride,
            ]
            for a in aliases
        )
        # The layout's names in the order of the records' digests.
        self._holders = [holder.get(name, name) for name in ordered] if bearer else ordered
        head = {
            "aliases": rows,
            "kind": [rank_of[kind_of[name]] for name in ordered],
            "kinds": used,
            "version": IDENTITY_VERSION,
        }
        self._head = join_binary(write_json(head), write_names(ordered)) + b"\0"

    def document(self, digests: Mapping[str, bytes]) -> bytes:
        """The document, given each tensor's blake3. Raises ManifestError where one is missing."""
        for name in self._holders:
            if len(digests.get(name, b"")) != TENSOR_DIGEST_BYTES:
                raise ManifestError(f"tensor {name!r} has no digest")
        return self._head + b"".join(map(digests.__getitem__, self._holders))

    def read(self, document: bytes) -> dict[str, bytes]:
        """Each tensor's digest, from a document that came from anywhere. Raises ManifestError."""
        if not document.startswith(self._head):
            raise ManifestError("the identity document does not describe this layout's tensors")
        raw = document[len(self._head) :]
        step = TENSOR_DIGEST_BYTES
        if len(raw) != step * len(self._holders):
            raise ManifestError("the identity document does not have one digest per tensor")
        digests = [raw[i : i + step] for i in range(0, len(raw), step)]
        return dict(zip(self._holders, digests, strict=True))


def _bearers(
    names: list[str], kinds: Sequence[Kind], kind: list[int], aliases: Sequence[Alias]
) -> dict[str, str]:
    """Canonical tensor -> the least of the names that view all of it, where that is another."""
    if not aliases:
        return {}
    kind_of = {name: kinds[k] for name, k in zip(names, kind, strict=True)}
    least: dict[str, str] = {}
    for a in aliases:
        whole = a.offset_bytes == 0 and (a.dtype, a.shape) == kind_of[a.target]
        if whole and a.stride == contiguous_strides(a.shape):
            least[a.target] = min(a.name, least.get(a.target, a.target))
    return {target: name for target, name in least.items() if name != target}
