"""python -m tests.differential --rounds N [--seed S]: see docs/chaos.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential")
    parser.add_argument("--rounds", type=int, default=2000, help="how many rounds to play")
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the rounds")
    parser.add_argument("--steps", default="", help="draw only these, separated by commas")
    arguments = parser.parse_args()
    if arguments.jobs > 1:
        return _shared(arguments.rounds, arguments.seed, arguments.jobs, arguments.steps)
    with tempfile.TemporaryDirectory(prefix="mx-differential-") as folder:
        # Nothing of the user's own: neither settings nor keys.
        for name in [each for each in os.environ if each.startswith("MX_PEER_")]:
            del os.environ[name]
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # coordinators are killed
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = f"{folder}/home"
        from tests.differential.run import run

        return run(arguments.rounds, arguments.seed, Path(folder), arguments.steps)


def _shared(rounds: int, seed: int, jobs: int, steps: str) -> int:
    """Divide the rounds among processes. Returns 1 if one of them fails."""
    part = -(-rounds // jobs)
    started = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.differential", "--steps", steps),
                *("--seed", str(first), "--rounds", str(min(part, seed + rounds - first))),
            ]
        )
        for first in range(seed, seed + rounds, part)
    ]
    return int(any([process.wait() for process in started]))


if __name__ == "__main__":
    sys.exit(main())
