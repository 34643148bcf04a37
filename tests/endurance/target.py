"""A process that pulls a model again and again, and compares every tensor.

It prints a line of JSON for each pull, and ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

import mx
from tests.chaos.weights import wrong

_WAIT_S = 60.0


def pull(model: str, expected: Mapping[str, str]) -> Mapping[str, Any]:
    """Pull a model into memory once, and return what came of it."""
    try:
        with mx.pull(model, wait_s=_WAIT_S) as pulled:
            report = pulled.wait()
            manifest, view = pulled.manifest, pulled.buffer()
            assert manifest is not None
            found = {}
            for tensor in manifest.layout.tensors:
                at = manifest.layout.layers[tensor.layer].arena_offset + tensor.offset
                found[tensor.name] = blake3(view[at : at + tensor.nbytes]).hexdigest()
            view.release()
    except mx.MxError as error:
        return {"event": "failed", "error": f"{type(error).__name__}: {error}"}
    return {
        "event": "pulled",
        "wrong": wrong(found, dict(expected)),
        "retries": report.retries,
        "fallback": report.fallback,
    }


def main() -> None:
    given = json.loads(sys.argv[1])
    expected = json.loads(Path(given["expected"]).read_text())
    over = threading.Event()

    def until_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=until_end, daemon=True).start()
    print(json.dumps({"event": "ready"}), flush=True)
    while not over.wait(given["pause_s"]):
        print(json.dumps(pull(given["model"], expected)), flush=True)


if __name__ == "__main__":
    main()
