"""A coordinator whose answers are what a file says: `python -m tests.integration.lying_coordinator
FILE PORT`.

The file has JSON: `asks` has the fields of the question that is answered in place of the one that
was asked; `vouch` is what the answer has in place of its own, in hexadecimal; `files_of` names the
model whose files it has. Without the file it is honest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mx.coordinator import daemon
from mx.coordinator.service import CoordinatorServicer
from mx.wire.v1 import coordinator_pb2 as pb
from tests.support.lies import lie

LIES = Path(sys.argv[1])


class LyingServicer(CoordinatorServicer):
    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:
        said = json.loads(LIES.read_text()) if LIES.exists() else {}
        name, asks = request.name.partition("@")[0], said.get("asks", {})
        for field, value in asks.items():
            setattr(request, field, value)
        answer = await super().Resolve(request, context)
        if asks:
            answer.model.name, answer.model.revision, answer.model.variant = name, "", ""
            answer.ClearField("newest")
            for source in answer.sources:
                source.model.CopyFrom(answer.model)
        if "vouch" in said:
            answer.vouch = bytes.fromhex(said["vouch"])
        if "files_of" in said:
            other = await super().Resolve(pb.ResolveRequest(name=said["files_of"]), context)
            answer.manifest.packaging.CopyFrom(other.manifest.packaging)
            answer.ClearField("documents")
        return answer


if __name__ == "__main__":
    lie(daemon, "CoordinatorServicer", LyingServicer)
    listen = f"127.0.0.1:{sys.argv[2]}"
    sys.exit(daemon.run(daemon.CoordinatorOptions(listen=listen), lambda address: None))
