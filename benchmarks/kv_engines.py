"""Measures the time to the first token of vLLM engines that take the KV blocks of a prompt from
another one, beside NixlConnector's and beside computing.

    .venv-vllm/bin/python -m benchmarks.kv_engines [--tokens 4096] [--rounds 3] [--without-nixl]

Two pairs of engines on CPUs, each in a process of its own: in each pair one prefills a prompt and
the other one decodes it, with what the first has passed on. In turns, with a prompt of its own for
each measurement. NixlConnector needs the packages `nixl` and `nixl-cu12`.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.daemon import daemon
from tests.vllm.checkpoints import write_checkpoint
from tests.vllm.hosts import Host, host, lending, start

_BLOCK = 64
#: A model that takes seconds to compute 4,096 tokens.
_MODEL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
#: Keys and values of a token in all layers, in bfloat16.
_TOKEN_BYTES = 2 * 2 * 8 * 8 * 64
#: How many prompts an engine's cache has room for, and a pool. So many are measured in vain: then
#: all of this memory has been used, as that of an engine that has run for a while.
_HELD = 3
#: The threads that computed a step would spin on all cores well into the next measurement.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
#: Of NixlConnector's time, and of that of computing.
BAR, GOAL = 1.1, 0.1


def _options(tokens: int, connector: dict[str, Any]) -> dict[str, Any]:
    length = tokens + 2 * _BLOCK
    return {
        "block_size": _BLOCK,
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "max_num_seqs": 1,
        "kv_cache_memory_bytes": _HELD * length * _TOKEN_BYTES,
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            **connector,
        },
    }


def _mx(tokens: int) -> dict[str, Any]:
    pool_bytes = (_HELD + 1) * (tokens + 2 * _BLOCK) * _TOKEN_BYTES
    return {
        "kv_connector": "MxConnector",
        "kv_connector_module_path": "mx.engines.vllm.connector",
        "kv_connector_extra_config": {"pool": str(pool_bytes), "wait_s": 30.0},
    }


def _nixl() -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}


@contextmanager
def _stopped(engines: Iterable[Host]) -> Iterator[None]:
    """Stop the engines that have no part in a measurement: what their threads do meanwhile is not
    what is measured."""
    pids = [each.process.pid for each in engines]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _first_token_s(engine: Host, prompt: list[int], **transfer: Any) -> float:
    began_s = time.perf_counter()
    engine.do("complete", prompt, 1, **transfer)
    return time.perf_counter() - began_s


def measure(tokens: int, rounds: int, with_nixl: bool) -> list[str]:
    """Return the rows of the table."""
    dice = random.Random(1)
    times: dict[str, list[float]] = {"mx": [], "nixl": [], "computed": []}
    with (
        tempfile.TemporaryDirectory(prefix="mx-kv-engines-") as made,
        daemon() as (_, coordinator),
        ExitStack() as stack,
    ):
        folder = Path(made)
        checkpoint = write_checkpoint(
            folder / "model", seed=1, **_MODEL, max_position_embeddings=tokens + 4 * _BLOCK
        )

        def engine(name: str, connector: dict[str, Any], port: int = 0) -> Host:
            more = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_PASSIVE}
            if port:
                more["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
            found = stack.enter_context(host(coordinator, folder / f"{name}.log", **more))
            if port:
                plain = {"model": str(checkpoint), "load_format": "auto"}
                found.do("start", **plain, **_options(tokens, connector))
            else:
                start(found, checkpoint, "m", **_options(tokens, connector))
                lending(found)
            return found

        pairs = {
            "mx": (
                engine("prefills", _mx(tokens)),
                engine("decodes", _mx(tokens)),
            )
        }
        if with_nixl:
            ports = 25600, 25700
            pairs["nixl"] = engine("a", _nixl(), ports[0]), engine("b", _nixl(), ports[1])
        for number in range(-_HELD, rounds):
            for name, (prefills, decodes) in pairs.items():
                prompt = [dice.randrange(250) for _ in range(tokens + 1)]
                first = prefills.do("complete", prompt, 1, do_remote_decode=True)
                others = [each for other, pair in pairs.items() if other != name for each in pair]
                with _stopped(others):
                    took_s = _first_token_s(decodes, prompt, **first["transfer"])
                if number >= 0:
                    times[name].append(took_s)
            prompt = [dice.randrange(250) for _ in range(tokens + 1)]
            with _stopped(pairs.get("nixl", ())):
                took_s = _first_token_s(pairs["mx"][1], prompt)
            if number >= 0:
                times["computed"].append(took_s)
        counts = pairs["mx"][1].do("kv")
    wanted = (rounds + _HELD) * (tokens // _BLOCK)
    came, failed = counts.get("loaded", 0), counts.get("failed", 0)
    rows = [f"{tokens} tokens, {wanted} blocks: {came} came, {failed} failed"]
    for name, each in times.items():
        if each:
            said = ", ".join(f"{took:.3f}" for took in each)
            ratios = [a / b for a, b in zip(times["mx"], each, strict=True)]
            rows.append(f"{name}: {said} s; mx takes {statistics.median(ratios):.2f} x")
    return [*rows, f"bars: {BAR} x nixl, {GOAL} x computed"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_engines", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-nixl", action="store_true")
    asked = parser.parse_args()
    print("\n".join(measure(asked.tokens, asked.rounds, not asked.without_nixl)))


if __name__ == "__main__":
    main()
