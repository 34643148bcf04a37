"""A process that watches a model's replicas, and prints a line of JSON for each change."""

from __future__ import annotations

import json
import sys

import mx


def main() -> None:
    given = json.loads(sys.argv[1])
    with mx.Router() as router:
        print(json.dumps({"event": "ready"}), flush=True)
        for change in router.watch(given["model"]):
            print(json.dumps({"event": "watched", "kind": type(change).__name__}), flush=True)


if __name__ == "__main__":
    main()
