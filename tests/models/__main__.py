"""Loads every type of model that transformers builds small, and compares what it computes.

    python -m tests.models [TYPE ...] [--jobs 2]

Each model is served and loaded; each layer is missing when it is first used. A type works if the
outputs and all tensors equal, bit for bit, those of a model that transformers loads from disk. The
exit code is 1 if one computes something else, or hangs.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.models import tiny

#: How many types one process tries.
BATCH = 12
TIMEOUT_S = 100.0


def attempt(name: str, folder: Path, coordinator: str) -> tuple[str, str]:
    """Try one type. Returns (outcome, detail); "works", "refused", "not built", "no inputs",
    "differs"."""
    import torch

    from mx import api, config
    from mx.engines.transformers.loader import load, loading
    from mx.errors import MxError
    from tests.support import families, gates

    config_class, model_class = next(found[1:] for found in tiny.types() if found[0] == name)
    try:
        model = tiny.make(config_class, model_class)
        families.scramble(model)
        model.save_pretrained(folder)
        del model
        reference = families.reference(folder)
    except Exception as error:  # noqa: BLE001 - transformers raises anything
        return "not built", _short(error)
    settings = config.Settings()
    given = None
    for candidate in tiny.candidates(reference):
        try:
            expected = tiny.computed(reference, candidate)
            again = tiny.computed(reference, candidate)
        except Exception:  # noqa: BLE001 - not an input of this model
            continue
        if expected and all(torch.equal(a, b) for a, b in zip(expected, again, strict=True)):
            given = candidate
            break
    with api.serve(folder, model=name, coordinator=coordinator, settings=settings):
        try:
            with gates.gate() as gated:
                model = load(name, coordinator=coordinator, settings=settings)
                found = None if given is None else tiny.computed(model, given)
                gated.open(loading(model)).wait()
        except MxError as error:
            return "refused", _short(error)
    different = families.differences(model, reference)
    if different:
        return "differs", f"tensors: {', '.join(different[:3])}"
    if found is None:
        return "no inputs", "all tensors are equal"
    equal = all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True)
    )
    return ("works", f"waited {gated.waited} times") if equal else ("differs", "outputs")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]


def batch(names: list[str], coordinator: str) -> None:
    """Try some types, in this process, and print a line for each."""
    import logging

    import torch
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    verbosity: Any = transformers.logging
    verbosity.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps([name, "begins", ""]), flush=True)
        folder = Path(tempfile.mkdtemp(prefix="mx-models-")) / name
        try:
            outcome, detail = attempt(name, folder, coordinator)
        except Exception as error:  # noqa: BLE001 - reported
            outcome, detail = "differs", _short(error)
        finally:
            shutil.rmtree(folder.parent, ignore_errors=True)
        print(json.dumps([name, outcome, detail]), flush=True)


def run_batch(names: list[str], coordinator: str) -> list[tuple[str, str, str]]:
    """Try some types in processes of their own; what hangs is ended, and the rest tried anew."""
    found: list[tuple[str, str, str]] = []
    left = list(names)
    while left:
        command = [sys.executable, "-m", "tests.models", "--batch", coordinator, *left]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            out, _ = process.communicate(timeout=TIMEOUT_S * 2 + 10 * len(left))
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        lines: list[Any] = [json.loads(line) for line in out.splitlines() if line[:1] == "["]
        ended = [tuple(line) for line in lines if line[1] != "begins"]
        found += ended
        done = {line[0] for line in ended}
        begun = [line[0] for line in lines if line[1] == "begins" and line[0] not in done]
        for name in begun or ([] if done else left[:1]):
            found.append((name, "differs", f"the process ended ({process.returncode}) or hung"))
            done.add(name)
        left = [name for name in left if name not in done]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--batch", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.batch:
        batch(asked.types, asked.batch)
        return
    from benchmarks.processes import Cluster

    names = asked.types or [name for name, *_ in tiny.types()]
    batches = [names[i : i + BATCH] for i in range(0, len(names), BATCH)]
    cluster = Cluster()
    counts: collections.Counter[str] = collections.Counter()
    try:
        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            for found in pool.map(lambda each: run_batch(each, cluster.coordinator), batches):
                for name, outcome, detail in found:
                    counts[outcome] += 1
                    print(f"{outcome:10} {name:32} {detail}", flush=True)
    finally:
        cluster.close()
    print(", ".join(f"{outcome}: {count}" for outcome, count in counts.most_common()))
    raise SystemExit(1 if counts["differs"] else 0)


if __name__ == "__main__":
    main()
