"""`log.set_up` changes the whole process: tests that call it undo that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_as_it_was() -> Iterator[None]:
    """Give loggers the levels and handlers at the end that they have at the beginning."""
    names = (None, "mx", "mx_transports", "grpc")
    loggers = [logging.getLogger(name) for name in names]
    before = [(each, each.level, list(each.handlers)) for each in loggers]
    try:
        yield
    finally:
        for logger, level, handlers in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
