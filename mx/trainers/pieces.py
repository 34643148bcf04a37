"""Which bytes of a model's tensors each rank of a trainer holds. Pure.

A rank lends its shards as tensors of a model of its own, its *part*: each is a run of a tensor's
bytes, cut where the tensor's blocks begin and end, so that the digests of whole blocks are those of
the model. Its name says where it belongs: `model.norm.weight#4096` begins at byte 4096.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import kind_nbytes
from mx.core.types import DTYPE_BITS, Layout
from mx.errors import ManifestError
from mx.units import align_up

#: The side file of a part that says what the whole model is.
DOCUMENT = "mx-part.json"
FORMAT = 1
#: The field of a variant that names a part, as `part=0/2`.
PART = "part"
_SIGN = "#"
_MOST_DIMS = 16


class PartPiece(NamedTuple):
    """Bytes [begin, end) of a tensor, in row-major order."""

    tensor: str
    begin: int
    end: int

    @property
    def name(self) -> str:
        """What it is called in the part that lends it."""
        return f"{self.tensor}{_SIGN}{self.begin}"


class PartSpan(NamedTuple):
    """Bytes [begin, end) of a tensor, and where they are: at `offset` in a tensor of a part."""

    begin: int
    end: int
    part: int
    index: int  # type: ignore[assignment]  # the tuple's own method
    offset: int


class TensorForm(NamedTuple):
    """A tensor of the whole model."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return kind_nbytes((self.dtype, self.shape, ()))


class PartDocument(NamedTuple):
    """What a part says of the whole: the forms of its tensors, and which share others' memory."""

    rank: int
    ranks: int
    tensors: dict[str, TensorForm]
    ties: dict[str, str]

    def encode(self) -> bytes:
        """Return it as JSON."""
        document = {
            "format": FORMAT,
            "rank": self.rank,
            "ranks": self.ranks,
            "tensors": {name: [form.dtype, form.shape] for name, form in self.tensors.items()},
            "ties": self.ties,
        }
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def decode(cls, data: bytes) -> PartDocument:
        """Return what `encode` has made of it. Raises ManifestError for anything else."""
        try:
            found = json.loads(data)
            if found["format"] != FORMAT:
                raise ManifestError(f"{DOCUMENT} has format {found['format']!r}, not {FORMAT}")
            rank, ranks = found["rank"], found["ranks"]
            tensors = {_text(name): _form(*form) for name, form in found["tensors"].items()}
            ties = {_text(name): _text(target) for name, target in found["ties"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ManifestError(f"{DOCUMENT} is not valid: {error!r}") from None
        if not (type(rank) is type(ranks) is int and 0 <= rank < ranks):
            raise ManifestError(f"{DOCUMENT} is of rank {rank!r} of {ranks!r}")
        if any(name in tensors or target not in tensors for name, target in ties.items()):
            raise ManifestError(f"{DOCUMENT} ties tensors that it does not have")
        return cls(rank, ranks, tensors, ties)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no name")
    return value


def _form(dtype: Any, shape: Any) -> TensorForm:
    if dtype not in DTYPE_BITS or len(shape) > _MOST_DIMS:
        raise ValueError(f"{dtype!r}, {shape!r}")
    if not all(type(each) is int and 0 <= each < 1 << 48 for each in shape):
        raise ValueError(f"{shape!r} is no shape")
    return TensorForm(dtype, tuple(shape))


def cut(tensor: str, begin: int, end: int, nbytes: int) -> Iterator[PartPiece]:
    """Yield bytes [begin, end) of a tensor in pieces: what lies before its first whole block, its
    whole blocks, and what follows them.

    Args:
        tensor: Its name.
        begin: The first byte.
        end: Where they end.
        nbytes: How many bytes the tensor has: its last block may be short, and is whole then.
    """
    first = align_up(begin, BLOCK_BYTES)
    last = end if end == nbytes else end - end % BLOCK_BYTES
    bounds = [begin, first, last, end] if first < last else [begin, end]
    for low, high in pairwise(bounds):
        if low < high:
            yield PartPiece(tensor, low, high)


def pieces_of(layout: Layout) -> list[PartPiece | None]:
    """Return the pieces that a part has, in the order of its layout; None for what is none."""
    found: list[PartPiece | None] = []
    for tensor in layout.tensors:
        name, sign, begin = tensor.name.rpartition(_SIGN)
        fits = sign and begin.isascii() and begin.isdecimal() and len(begin) < 20
        at = int(begin) if fits else 0
        found.append(PartPiece(name, at, at + tensor.nbytes) if fits else None)
    return found


def forms_of(documents: Sequence[PartDocument]) -> tuple[dict[str, TensorForm], dict[str, str]]:
    """Return the tensors of the whole model, and its ties, of what all of its parts say.

    Raises:
        ManifestError: They do not say the same.
    """
    tensors: dict[str, TensorForm] = {}
    ties: dict[str, str] = {}
    for document in documents:
        for name, form in document.tensors.items():
            if tensors.setdefault(name, form) != form:
                raise ManifestError(f"{name} is {tensors[name]} in one part, {form} in another")
        for name, target in document.ties.items():
            if ties.setdefault(name, target) != target:
                raise ManifestError(f"{name} shares memory with {ties[name]}, or with {target}")
    twice = sorted(tensors.keys() & ties.keys())
    if twice:
        raise ManifestError(f"{twice[0]} shares another tensor's memory in one part only")
    return tensors, ties


def spans_of(
    sizes: Mapping[str, int], parts: Sequence[Sequence[PartPiece | None]]
) -> dict[str, list[PartSpan]]:
    """Return where each tensor's bytes are, ascending: each byte once, taken in turns from the
    parts that have the same ones.

    Args:
        sizes: The bytes of each tensor.
        parts: The pieces of each part, as `pieces_of` returns them.

    Raises:
        ManifestError: No part has some bytes, or one has what is not in the model.
    """
    holders: dict[str, list[PartSpan]] = {name: [] for name in sizes}
    for part, pieces in enumerate(parts):
        for index, piece in enumerate(pieces):
            if piece is not None:
                own = holders.get(piece.tensor)
                if own is None or piece.end > sizes[piece.tensor]:
                    raise ManifestError(f"part {part} has {piece.name}, which the model has not")
                own.append(PartSpan(piece.begin, piece.end, part, index, 0))
    return {
        name: list(_chosen(name, sizes[name], own, turn))
        for turn, (name, own) in enumerate(holders.items())
    }


def _chosen(name: str, nbytes: int, held: list[PartSpan], turn: int) -> Iterator[PartSpan]:
    """Yield spans that cover a tensor."""
    held.sort()
    at = next_one = 0
    reaching: list[PartSpan] = []  # those that begin by `at`, and end later
    while at < nbytes:
        while next_one < len(held) and held[next_one].begin <= at:
            reaching.append(held[next_one])
            next_one += 1
        reaching = [each for each in reaching if each.end > at]
        if not reaching:
            raise ManifestError(f"no part has {name} from byte {at} on")
        furthest = max(each.end for each in reaching)
        equal = [each for each in reaching if each.end == furthest]
        span = equal[turn % len(equal)]
        yield PartSpan(at, furthest, span.part, span.index, at - span.begin)
        at = furthest


def edges(spans: Iterable[PartSpan], nbytes: int) -> list[int]:
    """Return which blocks of a tensor no part has whole, as the spans have them."""
    found: set[int] = set()
    for begin, end, *_ in spans:
        if begin % BLOCK_BYTES:
            found.add(begin // BLOCK_BYTES)
        if end % BLOCK_BYTES and end < nbytes:
            found.add(end // BLOCK_BYTES)
    return sorted(found)
