"""The form of manifest documents: one way to write it, and a strict, suspicious way to read it.

JSON, and where there is much of one thing, a line feed and raw bytes after it.
"""

from __future__ import annotations

import json
from typing import NoReturn, TypeVar

from mx.core.json_bounds import check_json
from mx.errors import ManifestError

#: Larger documents are refused before they are parsed (50,000 tensors take about 5 MB).
MAX_DOCUMENT_BYTES = 256 << 20

T = TypeVar("T")


def write_json(value: object) -> bytes:
    """Sorted keys, no spaces, UTF-8. Raises ManifestError for text that UTF-8 cannot carry."""
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a name holds half a surrogate pair: {error.object[:80]!r}") from None


def read_json(data: bytes, what: str) -> dict[str, object]:
    """The object that `data` holds. `what` names the document in errors.

    Raises ManifestError for anything but one JSON object: other encodings, duplicate keys,
    NaN and infinities, nesting and numbers of values that no model needs, numbers of thousands of
    digits, too large a document.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ManifestError(f"the {what} document has {len(data)} bytes, more than any model needs")

    def refuse_constant(text: str) -> NoReturn:
        raise ValueError(f"{text} is not JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("an object has the same key twice")
        return found

    try:
        check_json(data)
        value = json.loads(data.decode(), parse_constant=refuse_constant, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the {what} document is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"the {what} document is not a JSON object")
    return value


def write_names(names: list[str]) -> bytes:
    """Names in UTF-8, a NUL (which none may hold) between them: JSON would take five times as
    long to read. Raises ManifestError for text that UTF-8 cannot carry."""
    try:
        return "\0".join(names).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a name holds half a surrogate pair: {error.object[:80]!r}") from None


def read_names(raw: bytes, what: str) -> list[str]:
    """What `write_names` wrote. Raises ManifestError."""
    try:
        return raw.decode().split("\0")
    except UnicodeDecodeError as error:
        raise ManifestError(f"the names in the {what} document are not UTF-8: {error}") from None


def join_binary(head: bytes, raw: bytes) -> bytes:
    """A document of JSON and raw bytes: digests would take longer to spell out than to use."""
    return head + b"\n" + raw  # JSON as written here holds no line feed


def split_binary(data: bytes, what: str) -> tuple[bytes, bytes]:
    """What `join_binary` joined. Raises ManifestError."""
    head, found, raw = data.partition(b"\n")
    if not found:
        raise ManifestError(f"the {what} document has no binary part")
    return head, raw


def take(document: dict[str, object], key: str, kind: type[T], what: str) -> T:
    """`document[key]`, which must be exactly a `kind`: bool is no int here."""
    value = document.get(key)
    if type(value) is not kind:
        raise ManifestError(f"{key!r} in the {what} document is not a {kind.__name__}")
    return value


def take_list(document: dict[str, object], key: str, kind: type[T], what: str) -> list[T]:
    """`document[key]`, which must be a list of exactly `kind`s."""
    values = take(document, key, list, what)
    if not set(map(type, values)) <= {kind}:
        raise ManifestError(f"{key!r} in the {what} document is not a list of {kind.__name__}s")
    return values
