"""Loads every type of model that transformers builds small, and compares what it computes.

    python -m tests.models [TYPE ...] [--jobs 2] [--results FILE]

Each model is served and loaded; each layer is missing when it is first used. A type works if the
outputs and all tensors equal, bit for bit, those of a model that transformers loads from disk. The
exit code is 1 if one computes something else, or hangs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.models import inputs, tiny

#: How many types one process tries, for how long each, and with how much memory.
MOST_TYPES = 25
TIMEOUT_S = 300.0
BUILDING_S = 60.0
MEMORY_BYTES = 6 << 30


#: What a worker says of a type that it has built: from here on it is mx that may hang.
LOADS = "loads"


def attempt(name: str, folder: Path, coordinator: str) -> tuple[str, str]:
    """Try one type. Returns (outcome, detail); "works", "refused", "not built", "no inputs",
    "differs"."""
    import torch
    import transformers

    from mx import api, config
    from mx.engines.transformers.loader import load, loading
    from mx.errors import MxError
    from tests.support import families, gates

    config_class = transformers.CONFIG_MAPPING[name]
    model_class = tiny.class_of(config_class)
    reference, given, why, first = None, None, "", None
    built = tiny.models(config_class, model_class)
    until_s = time.monotonic() + BUILDING_S
    while given is None and (reference is None or time.monotonic() < until_s):
        try:
            if (model := next(built, None)) is None:
                break
            families.scramble(model)
            inputs_found, reason = inputs.find(model)
            why = why or reason
            if reference is None or inputs_found is not None:
                with tempfile.TemporaryDirectory(dir=folder.parent) as saved:
                    model.save_pretrained(saved)
                    found_reference = families.reference(Path(saved))
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.copytree(saved, folder)
                reference, given = found_reference, inputs_found
        except Exception as error:  # noqa: BLE001 - transformers raises anything
            first = first or error
    if reference is None:
        return "not built", _short(first or ValueError("no configuration can be made small"))
    print(json.dumps([name, LOADS, ""]), flush=True)
    del model
    settings = config.Settings()
    expected = [] if given is None else inputs.computed(reference, given)
    with api.serve(folder, model=name, coordinator=coordinator, settings=settings):
        try:
            with gates.gate() as gated:
                model = load(name, coordinator=coordinator, settings=settings)
                found = None if given is None else inputs.computed(model, given)
                gated.open(loading(model)).wait()
        except MxError as error:
            return "refused", _short(error)
    different = families.differences(model, reference)
    if different:
        return "differs", f"tensors: {', '.join(different[:3])}"
    if found is None:
        return "no inputs", f"all tensors are equal; {why[:120]}"
    equal = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
    return ("works", f"waited {gated.waited} times") if equal else ("differs", "outputs")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def work(coordinator: str) -> None:
    """Try the types that standard input names, one a line, and print a line for each."""
    import logging

    import torch
    import transformers

    # What asks for more than this ends with an error, not with the machine's memory.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verbosity: Any = transformers.logging
    verbosity.set_verbosity_error()
    torch.set_num_threads(1)
    for line in sys.stdin:
        name = line.strip()
        folder = Path(tempfile.mkdtemp(prefix="mx-models-")) / name
        try:
            outcome, detail = attempt(name, folder, coordinator)
        except Exception as error:  # noqa: BLE001 - reported
            outcome, detail = "differs", _short(error)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
        print(json.dumps([name, outcome, detail]), flush=True)


class Worker:
    """A process that tries types; another takes its place when one ends, hangs or grew."""

    def __init__(self, coordinator: str) -> None:
        self._coordinator = coordinator
        self._process: subprocess.Popen[str] | None = None
        self._tried = 0

    def attempt(self, name: str) -> tuple[str, str, str]:
        """Try a type. Returns its name, the outcome and a detail."""
        if self._tried == MOST_TYPES:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.models", "--worker", self._coordinator],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._tried = 0
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self._tried += 1
        ended = "not built"
        late = threading.Timer(TIMEOUT_S, process.kill)
        late.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            for line in process.stdout:
                if line[:1] == "[":
                    found, outcome, detail = json.loads(line)
                    if outcome != LOADS:
                        return found, outcome, detail
                    ended = "differs"
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        self.close()
        return name, ended, f"the process ended ({process.returncode}) or hung"

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def sweep(names: list[str], jobs: int) -> Iterator[tuple[str, str, str]]:
    """Try types, some at a time. Yields the name, the outcome and a detail of each."""
    from benchmarks.processes import Cluster

    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
    for name in names:
        left.put(name)
    cluster = Cluster()

    def run() -> None:
        worker = Worker(cluster.coordinator)
        try:
            while True:
                done.put(worker.attempt(left.get_nowait()))
        except queue.Empty:
            pass
        finally:
            worker.close()

    threads = [threading.Thread(target=run) for _ in range(jobs)]
    try:
        for thread in threads:
            thread.start()
        for _ in names:
            yield done.get()
    finally:
        with contextlib.suppress(queue.Empty):
            while True:
                left.get_nowait()
        for thread in threads:
            thread.join()
        cluster.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="all, if none is given")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--results", type=Path, help="a file of results: what it has is not tried again"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(asked.worker)
        return
    lines = []
    if asked.results is not None and asked.results.exists():
        lines = [json.loads(line) for line in asked.results.read_text().splitlines()]
    outcomes = {name: outcome for name, outcome, _ in lines}
    names = asked.types or [name for name, *_ in tiny.types()]
    for found in sweep([name for name in names if name not in outcomes], asked.jobs):
        name, outcome, detail = found
        outcomes[name] = outcome
        print(f"{outcome:10} {name:32} {detail}", flush=True)
        if asked.results is not None:
            with asked.results.open("a") as results:
                results.write(json.dumps(found) + "\n")
    counts = collections.Counter(outcomes.values())
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))
    raise SystemExit(1 if counts["differs"] else 0)


if __name__ == "__main__":
    main()
