"""Measures sets of compile caches: how fast one is checked and laid out, and what it saves.

    python -m benchmarks.artifacts [--rounds 3] [--compile] [--json]

A set of 50 MB in 480 files is checked (every blob's blake3) and laid out, against `sha256sum` and
`cp -r` of the same files. With `--compile`, torch.compile of a model of four blocks, in processes
of their own: cold, cold with Inductor's defaults, and with the cache of the first laid out in
another folder. That takes some minutes and needs torch and g++.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mx.artifacts import caches, package
from mx.artifacts.document import COMPILE_CACHE, ArtifactFile, Blob, Document
from mx.artifacts.trust import sign
from mx.config import inherited

from . import harness

FILES, NBYTES = 480, 50_000_000
#: The most of `sha256sum` and `cp` together, and of a cold compilation.
MOST_OF_TOOLS, MOST_OF_COLD = 1.5, 0.2

_CODE = """
import json, os, sys, time
from pathlib import Path
from mx.artifacts.usage import CacheWatch
watch = CacheWatch(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent)
import torch
nn = torch.nn
class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 4, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))
model, x = nn.Sequential(*(Block() for _ in range(4))).eval(), torch.randn(2, 16, 64)
with torch.no_grad():
    start_s = time.perf_counter()
    torch.compile(model)(x)
    seconds = time.perf_counter() - start_s
found = watch.report()
print(json.dumps({"seconds": seconds, "new": len(found.new_objects), "text": found.text}))
"""


def _write(place: Path) -> list[caches.CacheFile]:
    """Write the files of a set, sized as compilers leave them, and the set."""
    rng = random.Random(0)
    weights = [rng.paretovariate(1.2) for _ in range(FILES)]
    contents = {}
    for number, weight in enumerate(weights):
        data = rng.randbytes(int(NBYTES * weight / sum(weights)))
        contents[f"inductor/{number % 128:02x}/c{number}.main.so"] = data
    contents = dict(sorted(contents.items()))
    files = [ArtifactFile(path, blob, True) for blob, path in enumerate(contents)]
    blobs = [Blob(blake3(data).digest(), len(data)) for data in contents.values()]
    document = Document("bench", COMPILE_CACHE, int(time.time()), {}, blobs, files)
    signed = sign(document, Ed25519PrivateKey.generate())
    package.write(place / "set.safetensors", signed, contents.values())
    for path, data in contents.items():
        file = place / "files" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return document.cache_files


def _timed(run: Callable[[], object], made: Path) -> float:
    start_s = time.perf_counter()
    run()
    seconds = time.perf_counter() - start_s
    shutil.rmtree(made)
    return seconds


def laid_out(rounds: int) -> harness.Row:
    """Return the row of a set that is checked and laid out."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        files = _write(place)
        names = [str(place / "files" / file.path) for file in files]

        def ours() -> None:
            with package.ArtifactPackage(place / "set.safetensors") as found:
                blobs = [each.blob for each in found.document.files]
                caches.lay_out(
                    found.document.cache_files, lambda at: found.read(blobs[at]), place / "ours"
                )

        def tools() -> None:
            subprocess.run(["sha256sum", *names], check=True, stdout=subprocess.DEVNULL)
            subprocess.run(["cp", "-r", place / "files", place / "theirs"], check=True)

        samples = harness.interleave(
            {
                "mx": lambda: _timed(ours, place / "ours"),
                "sha256sum, cp": lambda: _timed(tools, place / "theirs"),
            },
            rounds,
        )
    own_s, tools_s = (harness.median(samples, name) for name in samples)
    detail = f"{own_s * 1000:.0f} ms against {tools_s * 1000:.0f} ms"
    work = "a set of 50 MB, checked and laid out, of sha256sum and cp"
    return harness.at_most(work, own_s / tools_s, "x", MOST_OF_TOOLS, detail, samples, digits=3)


def _compile(root: Path, values: Mapping[str, str]) -> dict[str, Any]:
    """Compile in a process of its own, as on another host: no header was compiled there before."""
    temporary = root.parent / f"{root.name}.tmp"
    temporary.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", _CODE], check=True, stdout=subprocess.PIPE,
        env={**inherited(""), **caches.variables(root), **values, "TMPDIR": str(temporary)},
    ).stdout  # fmt: skip
    found: dict[str, Any] = json.loads(said)
    return found


def compiled() -> list[harness.Row]:
    """Return the rows of torch.compile."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        defaults_s = _compile(
            place / "defaults", {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1"}
        )["seconds"]
        cold_s = _compile(place / "cold", {})["seconds"]
        files = caches.scan(place / "cold")
        data = [(place / "cold" / file.path).read_bytes() for file in files]
        os.rename(place / "cold", place / "gone")
        start_s = time.perf_counter()
        caches.lay_out(files, data.__getitem__, place / "shipped")
        laid_out_s = time.perf_counter() - start_s
        shipped = _compile(place / "shipped", {})
    shipped_s, new, text = shipped["seconds"], shipped["new"], shipped["text"]
    least_s = min(cold_s, defaults_s)
    detail = (
        f"{shipped_s:.1f} s; cold {cold_s:.1f} s, with a precompiled header {defaults_s:.1f} s; "
        f"{len(files)} files laid out in {laid_out_s * 1000:.0f} ms; {text}"
    )
    work = "torch.compile of 4 blocks with a shipped cache, of cold"
    return [
        harness.at_most(work, shipped_s / least_s, "x", MOST_OF_COLD, detail, digits=3),
        harness.at_most("new objects in the same", new, "", 0),
    ]


def main() -> int:
    """Measure, and print the table; 1 if a bar is missed."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    given = parser.parse_args()
    rows = [laid_out(given.rounds)]
    if given.compile:
        rows += compiled()
    harness.show(rows, as_json=given.json)
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
