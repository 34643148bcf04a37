"""What lent memory is in: lent to readers, about to change, or withdrawn. Pure.

lent        readers may read it; its owner does not write to it
entering    its owner wants to write, and waits until no reader trusts what it reads
changing    its owner may write
leaving     its owner has written; it is hashed and registered
withdrawn   it is not what was registered, or could not be registered again; `changing` lists
            it again
closed      it is given back to its owner

Who changes it may be gone at any moment. From each state in which a change runs there is a way out
that needs no owner: one that never wrote is left as after any change, one that may be half written
is withdrawn.
"""

from __future__ import annotations

import enum


class Lent(enum.Enum):
    LENT = "lent"
    ENTERING = "entering"
    CHANGING = "changing"
    LEAVING = "leaving"
    WITHDRAWN = "withdrawn"
    CLOSED = "closed"


class LentEvent(enum.Enum):
    ENTER = "enter"  # the owner wants to write
    OPEN = "open"  # no reader trusts what it reads any more
    LEAVE = "leave"  # the owner has written, or will not
    LIST = "list"  # it was hashed and registered
    WITHDRAW = "withdraw"
    CLOSE = "close"


TRANSITIONS = {
    (Lent.LENT, LentEvent.ENTER): Lent.ENTERING,
    (Lent.WITHDRAWN, LentEvent.ENTER): Lent.ENTERING,
    (Lent.ENTERING, LentEvent.OPEN): Lent.CHANGING,
    (Lent.ENTERING, LentEvent.LEAVE): Lent.LEAVING,
    (Lent.CHANGING, LentEvent.LEAVE): Lent.LEAVING,
    (Lent.LEAVING, LentEvent.LIST): Lent.LENT,
    (Lent.LENT, LentEvent.WITHDRAW): Lent.WITHDRAWN,
    (Lent.ENTERING, LentEvent.WITHDRAW): Lent.WITHDRAWN,
    (Lent.CHANGING, LentEvent.WITHDRAW): Lent.WITHDRAWN,
    (Lent.LEAVING, LentEvent.WITHDRAW): Lent.WITHDRAWN,
    **{(state, LentEvent.CLOSE): Lent.CLOSED for state in Lent},
    # What a change reports that was running then.
    **{
        (Lent.CLOSED, what): Lent.CLOSED
        for what in (LentEvent.OPEN, LentEvent.LEAVE, LentEvent.LIST, LentEvent.WITHDRAW)
    },
}


class LentState:
    """The state of some lent memory. `why` says why it was withdrawn, until it is lent again; then
    it is ""."""

    def __init__(self) -> None:
        self.now = Lent.LENT
        self.why = ""

    def step(self, what: LentEvent, why: str = "") -> None:
        """Go on to the next state.

        Args:
            what: The event.
            why: Why the memory is withdrawn, with WITHDRAW.

        Raises:
            ValueError: The event is not possible in this state, or a reason is missing.
        """
        following = TRANSITIONS.get((self.now, what))
        if following is None:
            raise ValueError(f"{what.value} is not possible while it is {self.now.value}")
        if following is Lent.WITHDRAWN:
            if not why:
                raise ValueError("a reason is missing")
            self.why = why
        elif following is Lent.LENT:
            self.why = ""
        self.now = following
