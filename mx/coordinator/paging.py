"""Splits answers into pages, so that each fits the default message limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

#: Answers with many sources stay well below the default message limit of 4 MiB.
ANSWER_BYTES = 2 << 20


#: The size of the pages of a list: a call that builds one lets others in between.
LIST_BYTES = 128 << 10


def pages_of(messages: Iterable[Any], page_nbytes: int = ANSWER_BYTES) -> Iterator[list[Any]]:
    """Yield the messages in pages of about `page_nbytes`; at least one page, for an empty
    answer."""
    page: list[Any] = []
    nbytes = 0
    for message in messages:
        size = message.ByteSize()
        if page and nbytes + size > page_nbytes:
            yield page
            page, nbytes = [], 0
        page.append(message)
        nbytes += size
    yield page
