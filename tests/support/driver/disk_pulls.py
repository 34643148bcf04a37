"""Programs over the stand-in that pull from disk into a GPU's memory, and say how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.driver.logs import kept, parsed
from tests.support.driver.programs import passes

#: Pulls a pinned model from disk into a GPU and prints how: the report or the error, the layers
#: that were ready (reads in flight end in any order), how many bytes the processor read, and how
#: many parts it hashed.
_PULL = """
import json
import numpy as np
import mx.core.digest
from mx import api, config
from mx.errors import MxError
from mx.memory import tensors
from mx.storage.disk_file import DiskBytes
from mx.testing import spans
from safetensors.numpy import load_file

FOLDER, PIN = {folder!r}, {pin!r}
settings = config.load({settings!r}, environ={{"HOME": "/nonexistent"}})
read_nbytes, hashed, layers = [], [], []
read, digests = DiskBytes.read_exactly, mx.core.digest.BlockHasher.block_digests
def counted(self, view, position, nbytes):
    read_nbytes.append(nbytes)
    read(self, view, position, nbytes)
def hashes(self):
    hashed.append(self)
    return digests(self)
DiskBytes.read_exactly = counted
mx.core.digest.BlockHasher.block_digests = hashes
said, options = {{}}, {{"device": "cuda:0"}}
def check(found):
    view, manifest = found.device_buffer(), found.manifest
    host = tensors.state_dict(memoryview(bytearray(spans.peek(view))), manifest.layout)
    for name, values in load_file(FOLDER + "/model.safetensors").items():
        assert (host[name].numpy() == values).all(), name
{before}
try:
    with api.pull("m@" + PIN, path=FOLDER, settings=settings, **options) as pull:
        pull.on_layer(lambda event: layers.append(event.index))
        report = pull.wait(120)
        said = report.to_json() | {{"how": report.paths[0].detail}}
        check(pull)
except MxError as error:
    said = {{"error": type(error).__name__, "exit": error.exit_code, "message": str(error)}}
    del error
said |= {{"read": sum(read_nbytes), "hashed": len(hashed), "layers_ready": sorted(layers)}}
print(json.dumps(said))
{after}
"""


def pulled(
    major: int,
    folder: tuple[Path, str],
    before: str = "",
    gpudirect: str = "auto",
    after: str = "",
    **how: Any,
) -> tuple[dict[str, Any], Path]:
    """Run `_PULL` and return what it says, and the folder of the driver's log, by which everything
    was given back."""
    log = folder[0].parent / "log"
    log.mkdir()
    code = _PULL.format(
        folder=str(folder[0]),
        pin=folder[1],
        settings={"gpudirect": gpudirect},
        before=before,
        after=after,
    )
    (line,) = passes(major, code, LOG=log, KERNELS=True, **how)
    for each in log.glob("*.log"):
        assert kept(parsed(each.read_text().splitlines())) == []
    return json.loads(line), log
