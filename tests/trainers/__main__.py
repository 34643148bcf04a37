"""`python -m tests.trainers [--rounds N] [--seed S]`: random trainers, read and followed."""

from __future__ import annotations

import argparse
import logging
import sys

from tests.trainers.run import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    logging.getLogger("mx").setLevel(logging.ERROR)
    return play(asked.rounds, asked.seed)


if __name__ == "__main__":
    sys.exit(main())
