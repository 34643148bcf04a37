"""python -m tests.chaos --pulls N [--seed S]: see docs/chaos.md."""

from __future__ import annotations

import argparse
import sys

from tests.chaos.run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--pulls", type=int, default=1000, help="the least number of pulls")
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    parser.add_argument(
        "--believe-everything",
        action="store_true",
        help="switch the targets' verification off, to check that wrong bytes are detected",
    )
    arguments = parser.parse_args()
    return run(arguments.pulls, arguments.seed, believe_everything=arguments.believe_everything)


if __name__ == "__main__":
    sys.exit(main())
