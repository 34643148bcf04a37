"""The processes of the rows about live memory: a source that lends, and readers of it.

Each is `python -c "from benchmarks.live_children import ..."`, prints a line when it is ready, and
does what it reads from its standard input, a line each.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from mx import api, config, plugins
from mx.units import MIB

try:
    import torch
except ModuleNotFoundError as error:
    raise SystemExit(f"live memory is measured with torch: {error}") from None

#: Models by name: the number of tensors, and the bytes of each. 20,480 is a multiple of the 256
#: bytes to which layer space aligns tensors, so that a contiguous model has no padding; 20,000 is
#: none.
MODELS = {
    "50,000 of 20,000 bytes": (50_000, 20_000),
    "50,000 of 20,480 bytes": (50_000, 20_480),
    "300 in 2 GB": (300, 2_000_000_000 // 300 // 256 * 256),
}
#: The lender of the row about its own work: a stack of linear layers, 256 MiB in all.
WIDTH, DEPTH, BATCH = 2048, 16, 64
STACK_BYTES = 4 * (WIDTH * WIDTH + WIDTH) * DEPTH


def tensors_of(name: str, *, seed: int | None = 0) -> dict[str, torch.Tensor]:
    """Return the tensors of one of `MODELS`, each an allocation of its own.

    Args:
        name: A key of `MODELS`.
        seed: What the random bytes follow from; None: all are zero.
    """
    count, nbytes = MODELS[name]
    random = torch.Generator().manual_seed(seed or 0)
    found = {}
    for index in range(count):
        each = torch.zeros(nbytes, dtype=torch.uint8)
        if seed is not None:
            each.view(torch.int64 if nbytes % 8 == 0 else torch.uint8).random_(generator=random)
        found[f"model.layers.{index * 24 // count}.mlp.experts.{index}.weight"] = each
    return found


def stack(seed: int = 0) -> torch.nn.Module:
    """Return the module of the row about the lender's own work."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def _settings(coordinator: str) -> config.Settings:
    return config.load({"coordinator": coordinator, "listen": "127.0.0.1:0"})


def serve(name: str, model: str, coordinator: str, copy: str) -> None:
    """Serve one of `MODELS` until the standard input ends."""
    with api.serve(
        tensors_of(name), model=model, settings=_settings(coordinator), copy=copy == "copy"
    ):
        print("ready", flush=True)
        sys.stdin.read()


def work(model: str, coordinator: str, max_bandwidth: str) -> None:
    """Lend a stack of layers, and compute with it: for each line N run it N times, and print the
    seconds that one took, the computing thread's CPU time in it, how long that thread waited for a
    core, and the CPU time of all other threads."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    module = stack()
    batch = torch.randn(BATCH, WIDTH)
    bounds = config.given(_settings(coordinator), max_bandwidth=max_bandwidth)
    with api.serve(module, model=model, settings=bounds, copy=False) as source:
        print(source.endpoint, flush=True)
        for line in sys.stdin:
            before = _times()
            for _ in range(int(line)):
                module(batch)
            spent = [(now - then) / int(line) for now, then in zip(_times(), before, strict=True)]
            print(*spent, flush=True)


def _times() -> tuple[float, float, float, float]:
    """Return this moment, this thread's CPU time, how long it has waited for a core, and the CPU
    time of the process's other threads; in seconds."""
    _, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    own_s = time.thread_time()
    return time.perf_counter(), own_s, int(waited_ns) / 1e9, time.process_time() - own_s


def read(model: str, endpoint: str, readers: str) -> None:
    """Read a model over and over by tcp, with so many readers, between the lines `go` and `stop`;
    print the bytes that have come after each line, and the process's CPU time. They stay on the
    last core, and are idle there if the lender needs it: elsewhere they are on other machines."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(19)
    going, over = threading.Event(), threading.Event()
    settings = config.load({"listen": "127.0.0.1:0"})
    counts = [0] * int(readers)

    def reader(index: int) -> None:
        buffer = bytearray(STACK_BYTES + MIB)
        while True:
            going.wait()
            if over.is_set():
                return
            with api.pull(
                model, peer=endpoint, transport="tcp", into=buffer, settings=settings
            ) as pull:
                before = 0
                while going.is_set() and before < STACK_BYTES:
                    time.sleep(0.05)
                    now = pull.progress().bytes_done
                    counts[index] += now - before
                    before = now

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(int(readers))]
    for thread in threads:
        thread.start()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            going.set()
        elif line.strip() == "stop":
            going.clear()
        print(sum(counts), time.process_time(), flush=True)
    over.set()
    going.set()


def idle_then_lend(name: str, model: str, coordinator: str) -> None:
    """Say `idle`, then make one of `MODELS`, then lend it: each after a line."""
    plugins.transports()
    print("idle", flush=True)
    sys.stdin.readline()
    found = tensors_of(name)
    print("made", flush=True)
    sys.stdin.readline()
    with api.serve(found, model=model, settings=_settings(coordinator), copy=False):
        print("ready", flush=True)
        sys.stdin.read()


def idle_then_fill(name: str, model: str, coordinator: str, transport: str) -> None:
    """Say `idle`, then make one of `MODELS`, then pull into it: each after a line."""
    plugins.transports()
    print("idle", flush=True)
    sys.stdin.readline()
    found = tensors_of(name, seed=1)
    print("made", flush=True)
    sys.stdin.readline()
    with api.pull(
        model, transport=transport, attach=False, into=found, settings=_settings(coordinator)
    ) as pull:
        print(pull.wait(120).bytes, flush=True)
        sys.stdin.readline()
