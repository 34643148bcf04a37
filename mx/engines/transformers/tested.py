"""The versions of transformers that mx was tested with."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger(__name__)

TESTED = ("5.19", "5.23", "5.24")


@functools.cache
def warn_if_untested() -> None:
    """Log, once in a process, that mx was not tested with this version of transformers."""
    from transformers import __version__

    if not str(__version__).startswith(tuple(f"{each}." for each in TESTED)):
        log.warning(
            "transformers %s was not tested with mx (%s were)", __version__, " and ".join(TESTED)
        )
