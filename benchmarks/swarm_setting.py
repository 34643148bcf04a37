"""The settings and the results of the simulation."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mx.core.holdings import members
from mx.core.swarm.commands import Command
from mx.core.swarm.receiver import Receiver
from mx.core.swarm.slots import WIDTH

#: From whom each receiver requests chunks. star: all from the origin; chain: each from the one
#: before; tree: a binomial tree; naive: a swarm without suggestions, in order; rarest: the same,
#: with the rarest chunk first, as in BitTorrent.
POLICIES = ("ours", "star", "chain", "tree", "naive", "rarest")


@dataclass(frozen=True)
class Setting:
    """A setting. Speeds are multiples of the link's; times are in seconds."""

    n: int = 31  # receivers
    k: int = 128  # chunks
    policy: str = "ours"
    seed: int = 0
    gbit_per_s: float = 1.0  # of each link, in each direction
    chunk_nbytes: int = 16 << 20
    latency_s: float = 0.0005  # of a message, one way
    width: int = WIDTH  # requests of a receiver, and slots of a source
    origin_readers: int = 16
    origin_speed: float = 1.0
    join_s: float = 0.0  # all have joined by then
    deaths: float = 0.0  # the part of the nodes that dies; at least one if it is not 0; never all
    detect_s: float = 0.1  # until neighbours know of a death
    slow: float = 1.0  # speed of the last node
    uneven: float = 1.0  # links differ from the usual one by up to this factor, up or down

    @property
    def chunks_per_s(self) -> float:
        return self.gbit_per_s * 1e9 / 8 / self.chunk_nbytes

    @property
    def ideal_s(self) -> float:
        """S/B: the model's time over one link."""
        return self.k / self.chunks_per_s


def label(setting: Setting) -> str:
    """Describe the setting briefly: N, K, and every unusual value except the seed."""
    usual = asdict(Setting(policy=setting.policy, seed=setting.seed))
    odd = {name: value for name, value in asdict(setting).items() if value != usual[name]}
    names = {"n": setting.n, "k": setting.k} | odd
    return " ".join(f"{name}={value:.4g}" for name, value in names.items())


@dataclass(frozen=True)
class Outcome:
    """The results of a run.

    Times are multiples of S/B (B: the slower of the node's link and the origin's), counted from
    when the node joined. A slowed node counts for none of them.
    """

    finish: float  # of the last living receiver
    finish_mean: float
    quarter: float  # mean time to hold the first quarter of all chunks
    origin_sent: float  # in models
    requests_per_chunk: float
    hedges: float
    neighbours: float  # the most of any node, without the origin
    events: float


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the median of each figure by itself."""
    values = {
        field.name: statistics.median(getattr(each, field.name) for each in outcomes)
        for field in fields(Outcome)
    }
    return Outcome(**values)


@dataclass(frozen=True)
class Row:
    """One setting and the medians over some seeds."""

    setting: Setting
    seeds: int
    outcome: Outcome
    worst: float  # the longest finish of all seeds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Row:
        setting, outcome = Setting(**data["setting"]), Outcome(**data["outcome"])
        return Row(setting, data["seeds"], outcome, data["worst"])


class Verified:
    """The chunks that are verified, as a bit set."""

    bits = 0


class SimulatedReceiver(Receiver):
    """Keeps its own set of verified chunks, in place of a pull."""

    def __init__(self, chunks: int, *, width: int) -> None:
        self.verified = Verified()
        super().__init__(chunks, self.verified, width=width)

    def landed(self, peer: int, chunk: int, now_s: float) -> list[Command]:
        self.verified.bits |= 1 << chunk
        return super().landed(peer, chunk, now_s)


class RarestFirst(SimulatedReceiver):
    """A receiver that requests a random one of the chunks that the fewest neighbours hold."""

    rng: random.Random

    def _pick(self, now_s: float) -> tuple[int, int] | None:
        peers = self._peers.items()
        able = {n: p for n, p in peers if not p.requested and p.busy_until_s <= now_s}
        there = 0
        for peer in able.values():
            there |= peer.have
        chunks = list(members(there & self._wanted))
        if not chunks:
            return None
        self.rng.shuffle(chunks)
        chunk = min(chunks, key=lambda c: sum(p.have >> c & 1 for _, p in peers))
        return min((p.cost, n) for n, p in able.items() if p.have >> chunk & 1)[1], chunk
