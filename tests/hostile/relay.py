"""A pull that passes on other bytes than it has verified: `python -m tests.hostile.relay LIES`.

LIES is a JSON object: "model" and "coordinator"; "bytes", as for `liar`, which it puts in the place
of each chunk that it verifies, after the first "truths"; "boasts": true, it also announces all
chunks at once. With "hold" it goes on when it has everything. It prints its endpoint as JSON when
others can read from it: at the end with "hold", else as soon as it has verified a few chunks.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from mx import api
from mx.core.holdings import Holdings
from mx.fetching.transfer import Transfer
from mx.swarm.node import Node
from mx.swarm.uploads import Uploads
from tests.support.lies import change, insist, lie

FIRST_ID = uuid.UUID("00000000-0000-4000-8000-000000000000")  # first among equals
#: Chunks that it has when it prints its endpoint.
A_FEW = 8


def pass_on_others(how: str, truths: int) -> None:
    """Change each chunk when it is verified, before others hear of it."""
    make = Transfer.__init__
    chosen = random.Random(5)

    def init(self: Transfer, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        grid, holdings = self.manifest.grid, self.holdings

        def add(chunk: int) -> bool:
            if holdings.bits.bit_count() >= truths:
                base = grid.layers[grid.layer_of[chunk]].arena_offset
                for offset, nbytes in grid.blocks(chunk):
                    block = self.arena[base + offset : base + offset + nbytes]
                    assert isinstance(block, memoryview)
                    change(block, how, chosen)
            return Holdings.add(holdings, chunk)

        lie(holdings, "add", add)

    lie(Transfer, "__init__", init)


def boast() -> None:
    """Announce every chunk, and allow it to be read."""
    request = Uploads.request

    def allow(self: Uploads, number: int, chunk: int, **options: Any) -> None:
        request(self, number, chunk, **(options | {"available": True}))

    lie(Node, "held", property(lambda self: (1 << self._chunk_count) - 1))
    lie(Uploads, "request", allow)


def endpoint_of(pull: api.Pull) -> str:
    """Return where others read from the pull, "" if they can't yet or it has few chunks."""
    sharing = pull._job.edition.sharing
    record = sharing.record() if sharing is not None else None
    node = sharing._node if sharing is not None else None
    enough = node is not None and node.holdings.bits.bit_count() >= A_FEW
    return record.endpoint if record is not None and enough else ""


def run(lies: Mapping[str, Any]) -> None:
    pass_on_others(lies["bytes"], lies.get("truths", 0))
    if lies.get("boasts"):
        boast()
    lie(uuid, "uuid4", lambda: FIRST_ID)
    insist()
    arguments: dict[str, Any] = {
        "coordinator": lies["coordinator"],
        "transport": "tcp",
        "attach": False,
    }
    with api.pull(lies["model"], hold=True, **arguments) as pull:
        if lies.get("hold"):
            endpoint = pull.hold().endpoint
        else:
            while not (endpoint := endpoint_of(pull)):
                time.sleep(0.02)
        print(json.dumps({"endpoint": endpoint}), flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run(json.loads(sys.argv[1]))
