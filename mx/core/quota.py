"""How many things each address gives up of too many. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def level_down(counts: Mapping[str, int], excess: int) -> dict[str, int]:
    """Return how many things each address gives up, so that `excess` are given up in all (or all
    there are) and those that have the most have as few as possible.

    Args:
        counts: How many things each address has.
        excess: How many are too many.

    Returns:
        The number for each address that gives up any.
    """
    ordered = sorted(counts.items(), key=lambda each: each[1], reverse=True)
    excess, total = min(excess, sum(counts.values())), 0
    if excess <= 0:
        return {}
    for place, (_, count) in enumerate(ordered, 1):
        total += count
        following = ordered[place][1] if place < len(ordered) else 0
        if total - place * following >= excess:
            break
    level, more = divmod(total - excess, place)  # the first `more` keep one more
    return {
        address: count - level - (number < more)
        for number, (address, count) in enumerate(ordered[:place])
        if count > level + (number < more)
    }
