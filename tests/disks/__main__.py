"""python -m tests.disks --rounds N [--seed S]: see docs/chaos.md."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disks")
    parser.add_argument("--rounds", type=int, default=300, help="how many folders to pull from")
    parser.add_argument("--seed", type=int, default=1, help="the first round's")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mx-disks-") as folder:
        # Nothing of the user's own: neither settings nor keys.
        for name in [each for each in os.environ if each.startswith("MX_PEER_")]:
            del os.environ[name]
        os.environ["XDG_STATE_HOME"] = os.environ["XDG_CONFIG_HOME"] = f"{folder}/home"
        from tests.disks.run import run

        return run(arguments.rounds, arguments.seed, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
