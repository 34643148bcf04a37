"""Why a path or a source is not read from. Plans, reports and errors have the words from here."""

from __future__ import annotations

import enum

from mx.errors import (
    DigestError,
    MxError,
    PathSlowError,
    PeerLostError,
    PeerRefusedError,
    PeerTimeoutError,
    StaleGenerationError,
)


class Why(enum.Enum):
    """The reasons. A value is what the user reads; {} stands for what a reason is about."""

    # of a plan
    UNASKED = "you asked for {}"
    UNSERVED = "the source does not serve over it"
    TRANSPORT = "{}"  # its own
    NEARER = "{} is nearer"
    AS_NEAR = "{} is as near"
    ENOUGH = "{} sources are enough"
    DRAINING = "{} is draining"
    ATTACHES = "{} attaches: there is nothing to move"
    FASTER = "{} is faster over the same {}"
    AS_FAST = "{} is as fast over the same {}"
    WITHIN = "{} does not leave the machine"
    LITTLE = "it would add less than {:.0%} to {}"
    # of a pull
    FULL = "{} has as many readers as it admits"
    IDLE = "{} has taken back the place of this reader, which read nothing for long"
    SLOWER = "it has become far slower than the other paths"
    LEFT = "{} has left"
    # of a pull, in words of the error that says so
    WRONG = "it sent wrong bytes"
    CHANGED = "it holds something else by now"
    STOPPED = "it makes no progress"
    GONE = "it is gone"
    REFUSED = "it does not admit this reader"
    FAILED = "it can't be used"

    def __call__(self, *about: object) -> PathReason:
        """Return the reason about these."""
        reason = PathReason(self.value.format(*about))
        reason.why = self
        return reason


class PathReason(str):
    """What the user reads, and which reason it is."""

    why: Why

    @property
    def code(self) -> str:
        """Which reason it is, in one word for programs."""
        return self.why.name.lower()


#: What an error means whose words are its own; the first that fits.
_MEANINGS: tuple[tuple[type[MxError], Why], ...] = (
    (DigestError, Why.WRONG),
    (StaleGenerationError, Why.CHANGED),
    (PathSlowError, Why.SLOWER),
    (PeerTimeoutError, Why.STOPPED),
    (PeerRefusedError, Why.REFUSED),
    (PeerLostError, Why.GONE),
)


def reason_of(error: MxError) -> PathReason:
    """Return why a source whose use has ended with this error is not read from."""
    if isinstance(error.message, PathReason):
        return error.message
    reason = PathReason(error.message)
    reason.why = next((why for kind, why in _MEANINGS if isinstance(error, kind)), Why.FAILED)
    return reason
