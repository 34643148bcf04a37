"""Whether a state has lost some of what coordinators have said of it. Pure.

A *mark* says how far the state had come: its epoch, and the number of the last entry of its stream.
Coordinators give marks to sources, which echo them. A mark that is newer than the state shows that
the state came back older (a backup, an asynchronous replica), one of another epoch that it came
back empty. The state then begins a new epoch in doubt, once for each loss.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import NamedTuple

from mx.errors import ConfigError

MAX_MARK_BYTES = 256
#: The most epochs of which is remembered that their loss was noticed.
_MAX_NOTED = 1024
_HEAD = struct.Struct(">Q")


class Mark(NamedTuple):
    """How far a state had come."""

    epoch: str
    sequence: int

    def encode(self) -> bytes:
        """Return the bytes that the coordinator's MAC covers, and that `decode` reads."""
        return _HEAD.pack(self.sequence) + self.epoch.encode()

    @classmethod
    def decode(cls, data: bytes) -> Mark:
        """Return the mark that `encode` wrote.

        Raises:
            ConfigError: It is written in another way.
        """
        try:
            (sequence,) = _HEAD.unpack_from(data)
            return cls(data[_HEAD.size :].decode(), sequence)
        except (struct.error, UnicodeDecodeError):
            raise ConfigError("a mark of another version") from None


class Losses:
    """Decides which marks show a loss, for one coordinator. The state may be other coordinators'
    too, which notice the same loss: only one of them begins an epoch (compare and set)."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, None] = OrderedDict()

    def shown(self, now: float, mark: Mark, state: Mark, doubt_until_s: float) -> bool:
        """Return True if a mark shows a loss that was not noticed before.

        Args:
            now: The time.
            mark: A mark that a coordinator has given.
            state: How far the state has come, after it has caught up.
            doubt_until_s: Until when it is in doubt; -inf: it never was.
        """
        if mark.epoch == state.epoch:
            return mark.sequence > state.sequence
        if mark.epoch in self._noted:
            return False
        # An epoch that began in doubt is that of a loss which was noticed, as far as the marks of
        # other epochs are not newer.
        noticed = now < doubt_until_s or (
            doubt_until_s > -math.inf and mark.sequence <= state.sequence
        )
        if noticed:
            self.note(mark.epoch)
        return not noticed

    def begun(self, epoch: str) -> None:
        """Note that the state is in this epoch now, maybe again: it may be lost anew."""
        self._noted.pop(epoch, None)

    def note(self, epoch: str) -> None:
        """Note that the loss of an epoch has been noticed: its marks show it no more."""
        self._noted[epoch] = None
        self._noted.move_to_end(epoch)
        if len(self._noted) > _MAX_NOTED:
            self._noted.popitem(last=False)
