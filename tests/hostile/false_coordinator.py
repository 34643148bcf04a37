"""A coordinator that lies, in a process of its own: `python -m tests.hostile.false_coordinator {}`.

It lists what registers, and answers NAME@PIN with whatever NAME stands for. It prints its address
as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from mx.coordinator import daemon
from mx.coordinator.service import CoordinatorServicer
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.lies import lie


class FalseServicer(CoordinatorServicer):
    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:
        request.name = request.name.partition("@")[0]
        return await super().Resolve(request, context)


def say(address: str) -> None:
    print(json.dumps({"address": address}), flush=True)


if __name__ == "__main__":
    lie(daemon, "CoordinatorServicer", FalseServicer)
    sys.exit(daemon.run(daemon.CoordinatorOptions(listen="127.0.0.1:0"), say))
