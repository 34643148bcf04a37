"""Measures live memory: tensors that are lent or filled where they are.

    python benchmarks/live_memory.py [--rounds 5] [--only scattered,place] [--models 0,2]

Needs torch, and 12 GB of memory. `benchmarks/live_rows.py` says what the rows are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path


def main() -> int:
    package = __package__ or "benchmarks"
    if not __package__:
        sys.path.insert(0, str(Path(__file__).parents[1]))
    live = importlib.import_module(f"{package}.live_rows")
    harness = importlib.import_module(f"{package}.harness")
    names, models = ",".join(live.NAMES), list(live.MODELS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=names, help=f"some of {names}")
    parser.add_argument("--models", default="0,1,2", help="; ".join(models))
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = live.run(
        lambda text: print(text, file=sys.stderr, flush=True),
        arguments.only.split(","),
        [models[int(index)] for index in arguments.models.split(",")],
        arguments.transports.split(","),
        arguments.rounds,
    )
    if arguments.json:
        table = [row.to_json() for row in rows]
        print(json.dumps({"machine": harness.machine(), "rows": table}, indent=1))
        return 0
    print(harness.machine())
    for row in rows:
        verdict = "met" if row.ok else "missed"
        print(f"{row.work:64} {row.value:7g} {row.unit:4}{row.bar:10} {verdict:7} {row.detail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
