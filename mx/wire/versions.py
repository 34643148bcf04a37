"""Versions as gRPC metadata: in the headers frame of each call, and of each answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mx.core.versions import own

VERSIONS_KEY = "mx-versions"


def headers() -> tuple[tuple[str, str], ...]:
    """Return the metadata that carries what this process speaks."""
    return ((VERSIONS_KEY, own().encode()),)


def sent(metadata: Iterable[tuple[str, Any]] | None) -> list[str]:
    """Return the texts that came with a call or an answer under the name of the versions."""
    return [str(value) for key, value in metadata or () if key == VERSIONS_KEY]


def answered(initial: Iterable[tuple[str, Any]] | None, trailing: Any) -> list[str]:
    """Return the texts that came with an answer: ahead of it or, with one of a single message and
    with a refusal, in its end."""
    return sent(initial) or sent(trailing)
