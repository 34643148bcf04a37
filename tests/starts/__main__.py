"""`make starts`: engines that start, sleep and wake up in bad luck. See docs/chaos.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mx import config
from tests.starts.run import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.starts", description=__doc__)
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first start")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share the starts")
    parser.add_argument("--go-on", action="store_true", help="after a broken rule")
    asked = parser.parse_args()
    if asked.jobs > 1:
        share = -(-asked.starts // asked.jobs)
        command = [sys.executable, "-m", "tests.starts", *(["--go-on"] if asked.go_on else [])]
        jobs = [
            subprocess.Popen(
                [*command, "--starts", str(share), "--seed", str(asked.seed + n * share)]
            )
            for n in range(asked.jobs)
        ]
        return max(job.wait() for job in jobs)
    config.quieten_grpc()
    began_s = time.monotonic()
    seeds = range(asked.seed, asked.seed + asked.starts)
    # On a disk: in memory the times of files prove nothing.
    with tempfile.TemporaryDirectory(prefix="mx-starts-", dir="/var/tmp") as folder:
        found = campaign(seeds, Path(folder), go_on=asked.go_on)
    seconds = time.monotonic() - began_s
    print(
        f"{found}\n{found.starts} starts from seed {asked.seed} on in {seconds:.0f} s", flush=True
    )
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
