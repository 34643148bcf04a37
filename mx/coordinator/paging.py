"""Answers in pages, so that any number fits the default message limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

#: Answers with many sources stay well below the default message limit of 4 MiB.
ANSWER_BYTES = 2 << 20


def pages_of(messages: Iterable[Any], page_bytes: int = ANSWER_BYTES) -> Iterable[list[Any]]:
    """Pages of about `page_bytes`; at least one, so that an empty list still answers."""
    page: list[Any] = []
    nbytes = 0
    for message in messages:
        size = message.ByteSize()
        if page and nbytes + size > page_bytes:
            yield page
            page, nbytes = [], 0
        page.append(message)
        nbytes += size
    yield page
