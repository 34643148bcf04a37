"""python -m tests.endurance --minutes N [--seed S]: see docs/reliability.md."""

from __future__ import annotations

import argparse
import sys

from tests.endurance.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    arguments = parser.parse_args()
    return run(arguments.minutes, arguments.seed)


if __name__ == "__main__":
    sys.exit(main())
