"""A receiver that keeps its own set of verified chunks, in place of a pull."""

from __future__ import annotations

from mx.core.swarm.commands import Command
from mx.core.swarm.receiver import Receiver
from mx.core.swarm.slots import WIDTH


class Verified:
    """The chunks that are verified, as a bit set."""

    bits = 0


class LoneReceiver(Receiver):
    def __init__(self, chunks: int, *, width: int = WIDTH) -> None:
        self.verified = Verified()
        super().__init__(chunks, self.verified, width=width)

    def landed(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        self.verified.bits |= 1 << chunk
        return super().landed(peer, chunk, now_s)
