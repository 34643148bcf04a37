"""What the ranks of one engine tell each other while they load.

All load the same weights: the first rank chooses, and where one rank can't load what was chosen,
all load something else. Only text and numbers go from one to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Ranks:
    """This process's place among the ranks of its engine."""

    def __init__(self, tp: Any, pp: Any, dp: tuple[int, int]) -> None:
        """
        Args:
            tp: The group of the tensor-parallel ranks, as vLLM and SGLang have it.
            pp: The group of the pipeline's stages.
            dp: The data-parallel rank and size. Other engines of such a group load by themselves.
        """
        self.places: Mapping[str, tuple[int, int]] = {
            "tp": (tp.rank_in_group, tp.world_size),
            "pp": (pp.rank_in_group, pp.world_size),
            "dp": dp,
        }
        self._groups = [group for group in (tp, pp) if group.world_size > 1]

    def __str__(self) -> str:
        return ",".join(f"{axis}={rank}/{size}" for axis, (rank, size) in self.places.items())

    @property
    def first(self) -> bool:
        """True for the rank that chooses."""
        return self.places["tp"][0] == 0 and self.places["pp"][0] == 0

    def from_first(self, text: str) -> str:
        """Return the first rank's text, on every rank.

        Args:
            text: What the first rank has to say; the others' texts are ignored.
        """
        for group in reversed(self._groups):  # along the first ranks of the stages, then in each
            text = _broadcast(group, text)
        return text

    def all_true(self, mine: bool) -> bool:
        """Return True if `mine` is true on every rank."""
        vote = torch.tensor([int(mine)], dtype=torch.int64)
        for group in self._groups:
            torch.distributed.all_reduce(
                vote, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group
            )
        return bool(vote.item())


def _broadcast(group: Any, text: str) -> str:
    data = text.encode()
    size = torch.tensor([len(data)], dtype=torch.int64)
    torch.distributed.broadcast(size, src=group.ranks[0], group=group.cpu_group)
    body = torch.zeros(int(size.item()), dtype=torch.uint8)
    if group.rank_in_group == 0:
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.distributed.broadcast(body, src=group.ranks[0], group=group.cpu_group)
    return bytes(body.tolist()).decode()
