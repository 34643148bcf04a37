"""Measures `from_pretrained` from this host's cache against the same call from disk.

    python -m benchmarks.from_pretrained [--rounds 3] [--layers 19] [--processes 3] [--svg FILE]

Each call is a process of its own, which has imported everything, and touches each page of the model
inside the timed region. Cold: the checkpoint is not in the page cache; warm: it is. A source in a
user namespace of its own, whose memory can't be attached, fills the cache. Needs transformers, the
command `unshare`, and 14 GB of memory.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from . import harness
from .checkpoints import llama_shapes, write_checkpoint
from .processes import Child, Cluster
from .svg import MX, Bar, bars

MODEL = "bench/llama"
_HIDDEN, _INTERMEDIATE, _VOCABULARY = 2048, 5632, 16000

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
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    how = "mx" if environment else "disk"
    child = Child("-c", _CALL, name, dtype, how, env={**(environment or {}), **offline})
    try:
        yield json.loads(child.hear()), child.pid
    finally:
        child.close()


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
    with closing(Cluster()) as cluster, tempfile.TemporaryDirectory(prefix="mx-bench-") as folder:
        environment = {
            "MX_PEER_COORDINATOR": cluster.coordinator,
            "MX_PEER_CACHE_SOCKET": f"{folder}/cache.sock",
        }
        cluster.serve(checkpoint, MODEL, prefix=("unshare", "--user", "--map-root-user"))
        cache = ("serve", "--cache", "--memory", memory, "--json")
        cluster.start("-m", "mx", *cache, env=environment).hear()
        yield environment


def measured(
    checkpoint: Path, environment: Mapping[str, str], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each way to get the model, one a round."""
    disk = str(checkpoint)

    def cold() -> float:
        forget(checkpoint)
        return seconds_of(disk, "", None, "")

    first = seconds_of(MODEL, "", environment, "cache")
    converted = seconds_of(MODEL, "float32", environment, "cache")
    harness.say(f"first: {first:.3f} s; first, converted: {converted:.3f} s")
    time.sleep(_SETTLE_S)
    ways: dict[str, Callable[[], float]] = {
        "cold": cold,
        "warm": lambda: seconds_of(disk, "", None, ""),
        "cache": lambda: seconds_of(MODEL, "", environment, "cache"),
        "disk, converted": lambda: seconds_of(disk, "float32", None, ""),
        "cache, converted": lambda: seconds_of(MODEL, "float32", environment, "converted"),
    }
    return harness.interleave(ways, rounds)


def rows(samples: Mapping[str, list[float]], shared: float, processes: int) -> list[harness.Row]:
    """Return the rows.

    Args:
        samples: From `measured`.
        shared: The memory of all processes together, in models.
        processes: How many they are.
    """
    cold_s, warm_s, cache_s, disk_s, converted_s = (
        harness.median(samples, name)
        for name in ("cold", "warm", "cache", "disk, converted", "cache, converted")
    )

    def row(what: str, value: float, unit: str, bar: float, *of: str) -> harness.Row:
        detail = ", ".join(f"{name} {harness.median(samples, name):.3f} s" for name in of)
        here = {name: samples[name] for name in of}
        return harness.at_most(what, value, unit, bar, detail, here, digits=3)

    cast = ("cache, converted", "disk, converted")
    return [
        row("cache / cold", cache_s / cold_s, "x", 0.25, "cache", "cold"),
        row("cache - warm", 1e3 * (cache_s - warm_s), "ms", 50, "cache", "warm"),
        row("converted / disk", converted_s / disk_s, "x", 0.15, *cast),
        row(f"memory of {processes} processes / the model", shared, "x", 1.1),
    ]


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
    return bars(
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


def main() -> None:
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--layers", type=int, default=19, help="19 are 2.1 GB")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the times")
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    given = parser.parse_args()
    checkpoint = make_checkpoint(given.folder.absolute(), given.layers)
    nbytes = (checkpoint / "model.safetensors").stat().st_size
    harness.say(f"{nbytes / 1e9:.2f} GB; load {os.getloadavg()[0]:.1f}")
    with cached(checkpoint, f"{4 * nbytes}") as environment:
        samples = measured(checkpoint, environment, given.rounds)
        shared = proportional(environment, given.processes)
    harness.show(rows(samples, shared / nbytes, given.processes), as_json=given.json)
    if given.svg is not None:
        medians = {what: statistics.median(each) for what, each in samples.items()}
        given.svg.write_text(drawn(medians, nbytes))


if __name__ == "__main__":
    main()
