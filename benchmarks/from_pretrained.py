"""Measures `from_pretrained` from this host's cache against the same call from disk.

    python -m benchmarks.from_pretrained [--rounds 3] [--layers 19] [--processes 3] [--svg FILE]

Each call is a process of its own, which has imported everything, and touches each page of the model
inside the timed region. Cold: the checkpoint is not in the page cache; warm: it is. A source in a
user namespace of its own, whose memory can't be attached, fills the cache. Needs transformers, the
command `unshare`, and 14 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.bars import MX, Bar, picture
from benchmarks.checkpoints import llama_shapes, write_checkpoint
from benchmarks.harness import machine
from benchmarks.processes import Cluster
from mx.api.caching import cached as cache_status

MODEL = "bench/llama"
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 5632, 16000
_ROOT = Path(__file__).resolve().parents[1]

#: The cache moves what it got into huge pages meanwhile.
_SETTLE_S = 20.0
#: What each process runs: the name or path, the dtype ("" for the checkpoint's), and whether mx
#: serves it. It prints the seconds, and how much memory of its own the call took; with input left
#: it then waits, to be looked at.
_CALL = """
import json, sys, time
name, dtype, patched = sys.argv[1:]
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
if patched == "mx":
    from mx.engines.transformers import counts, patch
    patch()
else:
    counts = dict
arguments = {"dtype": getattr(torch, dtype)} if dtype else {}

def own_bytes():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))

before_bytes = own_bytes()
start_s = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(name, **arguments)
for tensor in model.state_dict().values():
    tensor.detach().view(-1).view(torch.uint8)[::4096].max()
seconds = time.perf_counter() - start_s
own_bytes = own_bytes() - before_bytes
print(json.dumps({"seconds": seconds, "own_bytes": own_bytes, "counts": counts()}), flush=True)
sys.stdin.read()
"""


def make_checkpoint(folder: Path, layers: int) -> Path:
    """Write a Llama with random weights, and return its folder."""
    path = folder / f"llama-{layers}"
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        shapes = llama_shapes(layers, _HIDDEN, _INTERMEDIATE, _VOCABULARY)
        write_checkpoint(path / "model.safetensors", shapes)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": _HIDDEN,
            "intermediate_size": _INTERMEDIATE,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": _VOCABULARY,
            "dtype": "bfloat16",
        }
        (path / "config.json").write_text(json.dumps(config))
    return path


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


@contextmanager
def call(
    name: str, dtype: str, environment: Mapping[str, str] | None
) -> Iterator[tuple[dict[str, Any], int]]:
    """Run one process, and yield what it printed, and its number, while it waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CALL, name, dtype, "mx" if environment else "disk"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            **(environment or {}),
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        },
        cwd=_ROOT,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            yield json.loads(process.stdout.readline()), process.pid
        finally:
            process.stdin.close()


def seconds_of(name: str, dtype: str, environment: Mapping[str, str] | None, place: str) -> float:
    """Run one process to its end, and return how long its call took.

    Raises:
        RuntimeError: The model did not come from `place`.
    """
    with call(name, dtype, environment) as (said, _):
        if place and not said["counts"].get(place):
            raise RuntimeError(f"{name} did not come from {place}, but {said['counts']}")
        return float(said["seconds"])


@contextmanager
def cached(checkpoint: Path, memory: str) -> Iterator[dict[str, str]]:
    """Run a coordinator, a source and a cache; yield the settings of processes that use them."""
    cluster, folder = Cluster(), tempfile.mkdtemp(prefix="mx-bench-")
    try:
        environment = {
            "MX_PEER_COORDINATOR": cluster.coordinator,
            "MX_PEER_CACHE_SOCKET": f"{folder}/cache.sock",
        }
        arguments = ["-m", "mx", "serve", str(checkpoint), "--model", MODEL]
        source = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", sys.executable, *arguments,
             "--coordinator", cluster.coordinator],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            cluster.wait_for(MODEL, source)
            os.environ.update(environment)
            cluster.start("-m", "mx", "serve", "--cache", "--memory", memory)
            while cache_status() is None:
                time.sleep(0.05)
            yield environment
        finally:
            source.terminate()
            source.wait(30)
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure, and print ratios of medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=19, help="19 are 2.1 GB")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the times")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    arguments = parser.parse_args()
    checkpoint = make_checkpoint(arguments.folder.absolute(), arguments.layers)
    nbytes = (checkpoint / "model.safetensors").stat().st_size
    disk = str(checkpoint)
    print(machine())
    print(f"{nbytes / 1e9:.2f} GB; load {os.getloadavg()[0]:.1f}", flush=True)
    times: dict[str, list[float]] = {}

    def measure(what: str, *how: Any) -> None:
        times.setdefault(what, []).append(seconds_of(*how))
        print(f"  {what}: {times[what][-1]:.3f} s", file=sys.stderr, flush=True)

    with cached(checkpoint, f"{4 * nbytes}") as environment:
        measure("first", MODEL, "", environment, "cache")
        measure("first, converted", MODEL, "float32", environment, "cache")
        time.sleep(_SETTLE_S)
        for _ in range(arguments.rounds):
            forget(checkpoint)
            measure("cold", disk, "", None, "")
            measure("warm", disk, "", None, "")
            measure("cache", MODEL, "", environment, "cache")
            measure("disk, converted", disk, "float32", None, "")
            measure("cache, converted", MODEL, "float32", environment, "converted")
        shared = proportional(environment, arguments.processes)
    found = {what: statistics.median(each) for what, each in times.items()}
    for what, seconds in found.items():
        print(f"{what:20} {seconds:7.3f} s")
    row("cache / cold", found["cache"] / found["cold"], "x", 0.25)
    row("cache - warm", 1000 * (found["cache"] - found["warm"]), "ms", 50)
    row("converted / disk", found["cache, converted"] / found["disk, converted"], "x", 0.15)
    row(f"memory of {arguments.processes} processes / the model", shared / nbytes, "x", 1.1)
    if arguments.svg is not None:
        arguments.svg.write_text(drawn(found, nbytes))
    return 0


def drawn(found: Mapping[str, float], nbytes: int) -> str:
    """Return a picture of the calls' times."""
    plain = [
        Bar("from disk", found["cold"]),
        Bar("from disk, in the page cache", found["warm"]),
        Bar("from this host's cache", found["cache"], MX),
    ]
    cast = [
        Bar("from disk, in the page cache", found["disk, converted"]),
        Bar("from this host's cache", found["cache, converted"], MX),
    ]
    return picture(
        f"from_pretrained of {nbytes / 1e9:.1f} GB in bf16, every page touched",
        [("as the checkpoint has it", plain), ("cast to fp32, by another process before", cast)],
    )


def proportional(environment: Mapping[str, str], processes: int) -> int:
    """Return how much memory n processes that hold the model have of it together: what they map, in
    proportion, and what the calls took of their own, where copies would be."""
    with ExitStack() as stack:
        running = [stack.enter_context(call(MODEL, "", environment)) for _ in range(processes)]
        return sum(_mapped(pid) + int(said["own_bytes"]) for said, pid in running)


def _mapped(pid: int) -> int:
    """Return a process's proportional share of the memory files that it maps."""
    total, name = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            name = fields[5] if len(fields) > 5 else ""
        elif fields[0] == "Pss:" and name.startswith("/memfd:"):
            total += int(fields[1]) * 1024
    return total


def row(what: str, value: float, unit: str, bar: float) -> None:
    """Print a line with its bar."""
    print(f"{what:40} {value:8.3f} {unit:3} <= {bar:g}  {'met' if value <= bar else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
