"""A check of untrusted JSON before it is parsed: once parsed, it may take 30 times its size."""

from __future__ import annotations

from mx.units import MIB, format_bytes

#: The memory that a parsed document may take: about 160,000 tensors in one header.
MAX_PARSED_BYTES = 256 * MIB
#: The same for a transport's ticket.
MAX_TICKET_PARSED_BYTES = 16 * MIB
#: The documents of mx nest four deep; an index's own metadata may nest a little deeper.
MAX_DEPTH = 32

# Roughly the bytes that CPython takes for each; one of these characters precedes or begins each
# value.
_CONTAINER_BYTES = 100
_MEMBER_BYTES = 150
_ITEM_BYTES = 64

_WINDOW_BYTES = 1 << 18
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_json(data: bytes, *, most_nbytes: int = MAX_PARSED_BYTES) -> None:
    """Refuse JSON that would take too much memory or nests too deep.

    Takes linear time: it counts the characters between values, and leaves out those in strings
    only if there are too many.

    Args:
        data: JSON in UTF-8; it need not be valid.
        most_nbytes: The estimated memory that it may take once parsed.

    Raises:
        ValueError: It breaks a bound; the message says which.
    """
    if _parsed_bytes(data) <= most_nbytes and _is_shallow(data):
        return
    bare = _without_strings(data)
    if _parsed_bytes(bare) > most_nbytes:
        raise ValueError(
            f"it holds more values than fit into {format_bytes(most_nbytes)} of memory"
        )
    if not _is_shallow(bare):
        raise ValueError(f"its brackets do not match, or nest more than {MAX_DEPTH} deep")


def _without_strings(data: bytes) -> bytes:
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # no quote is escaped any more
    found = bytearray()
    inside = 0
    for start in range(0, len(bare), _WINDOW_BYTES):
        pieces = bare[start : start + _WINDOW_BYTES].split(b'"')
        found += b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1
    return bytes(found)


def _parsed_bytes(data: bytes) -> int:
    containers = data.count(b"[") + data.count(b"{")
    members, items = data.count(b":"), data.count(b",")
    return containers * _CONTAINER_BYTES + members * _MEMBER_BYTES + items * _ITEM_BYTES


def _is_shallow(data: bytes) -> bool:
    """Return True if the brackets, those in strings included, match at most MAX_DEPTH deep."""
    brackets = data.translate(None, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each takes the innermost ones away
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if not brackets:
            return True
    return False
