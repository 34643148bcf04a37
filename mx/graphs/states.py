"""The states of a graph on its way into an engine. Pure.

    opened -> restored -> proved -> launched
       any of these    -> refused
       all             -> closed

`refused` and `closed` stay. A graph that was launched is not proved again: a proof writes into the
memory that the engine uses by then.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from mx.core.variant import Difference


class State(enum.Enum):
    """What may be done with a graph."""

    OPENED = "opened"  # nothing yet
    RESTORED = "restored"  # checked, loaded and instantiated; the weights may still arrive
    PROVED = "proved"  # its results are right
    LAUNCHED = "launched"  # the engine uses it
    REFUSED = "refused"  # the engine captures as always
    CLOSED = "closed"


class GraphStep(enum.Enum):
    """What happens to a graph."""

    RESTORE = "restore"
    PROVE = "prove"
    LAUNCH = "launch"
    REFUSE = "refuse"
    CLOSE = "close"


class Cause(enum.Enum):
    """Why a graph is refused."""

    MALFORMED = "malformed"  # the message is not a graph, or out of bounds
    ENVIRONMENT = "environment"  # another GPU, driver, library, ...
    PIN = "pin"  # of other weights
    OCCUPIED = "occupied"  # something else is at its addresses
    MEMORY = "memory"  # there is too little
    IMAGE = "image"  # an image is absent, or is not what its hash says
    KERNEL = "kernel"  # a kernel is absent, or has other parameters
    GOLDEN = "golden"  # the golden replay gave other bytes
    UNSEEN = "unseen"  # an input that the capture did not see gave other bytes than the engine
    DRIVER = "driver"  # a call of the driver failed
    OTHER = "other"  # the caller's own functions failed


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a graph is not used. `differences` are those of the environment: the publisher's value
    first, then this process's."""

    cause: Cause
    message: str
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return f"{self.cause.value}: {self.message}"


class Refusal(Exception):
    """Ends a step with a reason."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.reason = reason


def refuse(cause: Cause, message: str, differences: Sequence[Difference] = ()) -> NoReturn:
    """Raise a refusal."""
    raise Refusal(Reason(cause, message, tuple(differences)))


_LIVE = (State.OPENED, State.RESTORED, State.PROVED, State.LAUNCHED)
_NEXT: dict[tuple[State, GraphStep], State] = {
    (State.OPENED, GraphStep.RESTORE): State.RESTORED,
    (State.RESTORED, GraphStep.PROVE): State.PROVED,
    (State.PROVED, GraphStep.LAUNCH): State.LAUNCHED,
    (State.LAUNCHED, GraphStep.LAUNCH): State.LAUNCHED,
    **{(state, GraphStep.REFUSE): State.REFUSED for state in _LIVE},
    **{(state, GraphStep.CLOSE): State.CLOSED for state in State},
}


class GraphProgress:
    """Where one graph is. `reason` is the first one of a refusal."""

    def __init__(self) -> None:
        self.state = State.OPENED
        self.reason: Reason | None = None

    def may(self, step: GraphStep) -> bool:
        """Return True if the step is possible now."""
        return (self.state, step) in _NEXT

    def take(self, step: GraphStep) -> bool:
        """Take a step and return True; do nothing and return False where it is not possible."""
        following = _NEXT.get((self.state, step))
        if following is None:
            return False
        self.state = following
        return True

    def refuse(self, reason: Reason) -> bool:
        """Refuse the graph, unless it is refused or closed already; return whether that is new."""
        if not self.take(GraphStep.REFUSE):
            return False
        self.reason = reason
        return True
