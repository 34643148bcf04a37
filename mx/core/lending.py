"""What lent memory is in: lent to readers, about to change, or withdrawn. Pure.

lent        readers may read it; its owner does not write to it
changing    its owner may write to it; no reader may trust what it reads
withdrawn   it is not what was registered, or could not be registered again; `changing` lists
            it again
"""

from __future__ import annotations

import enum


class Lent(enum.Enum):
    LENT = "lent"
    CHANGING = "changing"
    WITHDRAWN = "withdrawn"


class LentEvent(enum.Enum):
    ENTER = "enter"  # the owner wants to write
    LIST = "list"  # it was hashed and registered
    WITHDRAW = "withdraw"


TRANSITIONS = {
    (Lent.LENT, LentEvent.ENTER): Lent.CHANGING,
    (Lent.WITHDRAWN, LentEvent.ENTER): Lent.CHANGING,
    (Lent.CHANGING, LentEvent.LIST): Lent.LENT,
    (Lent.CHANGING, LentEvent.WITHDRAW): Lent.WITHDRAWN,
    (Lent.LENT, LentEvent.WITHDRAW): Lent.WITHDRAWN,
}
