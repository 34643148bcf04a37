"""`python -m tests.kills sqlite|redis [KILLS] [SEED]`: kill coordinators, and count."""

from __future__ import annotations

import asyncio
import random
import sys

from tests.kills.run import play


def main() -> int:
    kind, kills, seed = [*sys.argv[1:], *("sqlite", "100", "0")[len(sys.argv) - 1 :]]
    seeded = int(seed) or random.randrange(1, 1 << 30)
    random.seed(seeded)
    print(f"{kind}: seed {seeded}", flush=True)
    counts = asyncio.run(play(kind, int(kills)))
    print(f"{kind}: {counts}")
    for each in counts.wrong[:20]:
        print(f"  {each}")
    return int(bool(counts.wrong))


if __name__ == "__main__":
    sys.exit(main())
