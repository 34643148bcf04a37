"""The form of manifest documents: one canonical writer, and a strict reader for untrusted input.

A document is JSON; long columns follow it as raw bytes, after a line feed.
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
    """Return `value` as JSON with sorted keys, without spaces, in UTF-8.

    Raises:
        ManifestError: A text cannot be encoded in UTF-8.
    """
    try:
        return json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a name holds half a surrogate pair: {error.object[:80]!r}") from None


def read_json(data: bytes, what: str) -> dict[str, object]:
    """Return the JSON object that `data` holds.

    Args:
        data: The document, from anywhere.
        what: The document's name in errors.

    Raises:
        ManifestError: `data` is not exactly one JSON object in UTF-8, is too large, has duplicate
            keys, NaN, an infinity or a number of thousands of digits, or has more values or
            deeper nesting than any model needs.
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
    """Return the names in UTF-8, joined by NUL, which no name may contain.

    JSON would take five times as long to read.

    Raises:
        ManifestError: A name cannot be encoded in UTF-8.
    """
    try:
        return "\0".join(names).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a name holds half a surrogate pair: {error.object[:80]!r}") from None


def read_names(raw: bytes, what: str) -> list[str]:
    """Return the names that `write_names` wrote.

    Raises:
        ManifestError: `raw` is not UTF-8; `what` names the document.
    """
    try:
        return raw.decode().split("\0")
    except UnicodeDecodeError as error:
        raise ManifestError(f"the names in the {what} document are not UTF-8: {error}") from None


def join_binary(head: bytes, raw: bytes) -> bytes:
    """Return a document of JSON and raw bytes: spelling digests out would take longer than using
    them."""
    return head + b"\n" + raw  # JSON as written here holds no line feed


def split_binary(data: bytes, what: str) -> tuple[bytes, bytes]:
    """Return the JSON and the raw bytes that `join_binary` joined.

    Raises:
        ManifestError: There is no binary part; `what` names the document.
    """
    head, found, raw = data.partition(b"\n")
    if not found:
        raise ManifestError(f"the {what} document has no binary part")
    return head, raw


def take(document: dict[str, object], key: str, kind: type[T], what: str) -> T:
    """Return `document[key]`, which must be exactly a `kind`: a bool is not an int here.

    Raises:
        ManifestError: It is missing or of another type; `what` names the document.
    """
    value = document.get(key)
    if type(value) is not kind:
        raise ManifestError(f"{key!r} in the {what} document is not a {kind.__name__}")
    return value


def take_list(document: dict[str, object], key: str, kind: type[T], what: str) -> list[T]:
    """Return `document[key]`, which must be a list of exactly `kind`s.

    Raises:
        ManifestError: It is missing or of another type; `what` names the document.
    """
    values = take(document, key, list, what)
    if not set(map(type, values)) <= {kind}:
        raise ManifestError(f"{key!r} in the {what} document is not a list of {kind.__name__}s")
    return values
