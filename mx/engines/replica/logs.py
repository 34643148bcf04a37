"""The loggers whose lines an engine's users see."""

from __future__ import annotations

import logging


def logger_of(engine: str) -> logging.Logger:
    """Return the logger for lines about an engine: below the engine's own, which shows them.

    Args:
        engine: What messages call the engine: "vLLM" or "SGLang".
    """
    return logging.getLogger(f"{engine.lower()}.mx_peer")
