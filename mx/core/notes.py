"""What a source says of the folder that its files are from: which files it leaves out, which model
an adapter in it is for, and which repository it was downloaded from.

People read it. No pin covers it, and nothing is decided by it: two folders with the same files have
the same pin, whatever lies beside these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mx.core.json_bounds import check_json
from mx.core.types import MAX_NOTES_BYTES
from mx.text import plain
from mx.units import format_bytes

#: The most characters of each text in it.
_MOST_CHARS = 600
_MOST_PARSED_BYTES = 4 << 20


@dataclass(frozen=True)
class Notes:
    """What a source says of its folder.

    `left_out` has, by path, why a file does not travel; `more` counts further ones, which there was
    no room for. `companions` has the bytes of each companion by its path. `repository`, `commit`
    and, by path, `sha256` (in hexadecimal) are those of the hub's cache that the files are in; ""
    and {} for another folder. `base` is the model that an adapter names as its base, "" for weights
    that are not an adapter.
    """

    left_out: Mapping[str, str] = field(default_factory=dict)
    more: int = 0
    repository: str = ""
    commit: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)
    companions: Mapping[str, int] = field(default_factory=dict)
    base: str = ""

    def encode(self) -> bytes:
        """Return the document, b"" for nothing. Of too many files the last ones are only
        counted."""
        if self == Notes():
            return b""
        named = [(plain(path), reason) for path, reason in self.left_out.items()]
        hashed = [(plain(path), digest) for path, digest in self.sha256.items()]
        companions = list(self.companions.items())
        while True:
            by_reason: dict[str, list[str]] = {}
            for path, reason in named:
                by_reason.setdefault(reason, []).append(path)
            document = {
                "left_out": by_reason,
                "more": self.more + len(self.left_out) - len(named),
                "repository": self.repository,
                "commit": self.commit,
                "sha256": dict(hashed),
                "companions": dict(companions),
                "base": self.base,
            }
            data = json.dumps(document, separators=(",", ":")).encode()
            if len(data) <= MAX_NOTES_BYTES:
                return data
            if hashed:
                hashed = hashed[: len(hashed) // 2]
            elif named:
                named = named[: len(named) * 9 // 10]
            else:
                companions = companions[: len(companions) // 2]

    def to_json(self) -> dict[str, object]:
        """Return the fields as the objects of `--json` have them."""
        left_out = [{"path": path, "reason": why} for path, why in self.left_out.items()]
        found: dict[str, object] = {"left_out": left_out}
        if self.base:
            found["base"] = self.base
        companions = [{"path": path, "bytes": n} for path, n in self.companions.items()]
        if companions:
            found["companions"] = companions
        if self.more:
            found["left_out_more"] = self.more
        if self.repository:
            found["hub"] = {
                "repository": self.repository,
                "commit": self.commit,
                "sha256": dict(self.sha256),
            }
        return found

    def lines(self) -> list[str]:
        """Return what is to be said of it."""
        found = [f"adapter of {self.base}"] if self.base else []
        found += [f"companion {path}: {format_bytes(n)}" for path, n in self.companions.items()]
        found += self.lines_of_left_out()
        if self.repository:
            found.append(f"from {self.repository} at {self.commit}")
        return found

    def lines_of_left_out(self) -> list[str]:
        """Return those of `lines` that name what does not travel."""
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(path)
        found = [f"left out ({reason}): {', '.join(paths)}" for reason, paths in by_reason.items()]
        return [*found, f"left out: {self.more} more"] if self.more else found


def decode(data: bytes) -> Notes:
    """Return what a document from anywhere says; nothing if it is malformed."""
    if not data or len(data) > MAX_NOTES_BYTES:
        return Notes()
    try:
        check_json(data, most_nbytes=_MOST_PARSED_BYTES)
        found = json.loads(data)
        left_out = {
            _text(path): _text(reason)
            for reason, paths in dict(found["left_out"]).items()
            for path in list(paths)
        }
        sha256 = {_text(path): _text(digest) for path, digest in dict(found["sha256"]).items()}
        companions = {_text(p): _count(n) for p, n in dict(found["companions"]).items()}
        repository, commit = _text(found["repository"]), _text(found["commit"])
        more = _count(found["more"])
        base = _text(found.get("base", ""))  # a source of an older release says nothing of it
        return Notes(left_out, more, repository, commit, sha256, companions, base)
    except (ValueError, TypeError, KeyError, RecursionError):
        return Notes()


def adapter_base(config: bytes) -> str:
    """Return the model that an adapter is for.

    Args:
        config: The adapter's configuration, from anywhere.

    Returns:
        Its name, short and without control characters; "" if it names none.
    """
    try:
        check_json(config, most_nbytes=_MOST_PARSED_BYTES)
        return _text(json.loads(config)["base_model_name_or_path"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError("this is not text")
    return plain(found)[:_MOST_CHARS]


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise ValueError("this counts nothing")
    return found
