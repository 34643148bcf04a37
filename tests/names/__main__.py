"""`python -m tests.names [--rounds N] [--seed S] [--jobs J]`: names never go back, by chance."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys

from tests.names.run import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.names", description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of the first round")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the rounds")
    parser.add_argument("--state", default="", help="memory, sqlite or redis; by default all")
    asked = parser.parse_args()
    if asked.jobs > 1:
        share = -(-asked.rounds // asked.jobs)
        command = [sys.executable, "-m", "tests.names", "--state", asked.state]
        jobs = [
            subprocess.Popen(
                [*command, "--rounds", str(share), "--seed", str(asked.seed + n * share)]
            )
            for n in range(asked.jobs)
        ]
        return max(job.wait() for job in jobs)
    logging.getLogger("mx").setLevel(logging.ERROR)
    return play(asked.rounds, asked.seed, asked.state)


if __name__ == "__main__":
    sys.exit(main())
