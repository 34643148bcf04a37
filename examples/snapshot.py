"""An engine that starts from a snapshot: cold against thawed.

    make setup-vllm && .venv-vllm/bin/python examples/snapshot.py

The first engine reads a small checkpoint from disk. What it holds then is frozen to a folder. The
second engine knows only the model's name and that folder. Both generate the same tokens; how long
each took, by stage, is printed.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import children
import vllm_replica
from vllm_replica import NAME


def engine(model: str, options: dict[str, str], snapshot: str, conn: Connection) -> None:
    """Run one engine: send what it generates and how long each stage took. The first one writes
    what it holds to `snapshot`, if that is named."""
    began_s = time.monotonic()
    children.end_with()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is this process
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()  # as in vllm_replica.py
    stages = {"imports": time.monotonic() - began_s}

    def until_now(stage: str) -> None:
        stages[stage] = time.monotonic() - began_s - sum(stages.values())

    llm = LLM(
        model=model,
        load_format="mx-peer",
        model_loader_extra_config={"model": NAME, **options},
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    until_now("engine with weights")
    parameters = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": [1, 5, 9]}], parameters, use_tqdm=False)
    until_now("tokens")
    if snapshot:
        (report,) = llm.collective_rpc("mx_peer_freeze", args=(snapshot,))
        print(f"frozen: {report['bytes'] / 1e6:.1f} MB in {report['seconds']:.2f} s")
    status = llm.collective_rpc("mx_peer_status")[0]
    conn.send((list(made[0].outputs[0].token_ids), status, stages))
    llm.llm_engine.engine_core.shutdown()


def run(
    model: str, options: dict[str, str], snapshot: str = ""
) -> tuple[list[int], dict[str, object], dict[str, float]]:
    """Run an engine in a process of its own, and return what it sends."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=engine, args=(model, options, snapshot, there))
    process.start()
    there.close()  # the engine's, so that its end is seen
    try:
        return here.recv()
    finally:
        process.join()


def main() -> None:
    children.end_on_signals()
    with tempfile.TemporaryDirectory() as scratch, vllm_replica.coordinator() as address:
        checkpoint, snapshot = Path(scratch, "checkpoint"), str(Path(scratch, "snapshot"))
        vllm_replica.write_checkpoint(checkpoint)
        where = {"coordinator": address}
        cold = run(str(checkpoint), where, snapshot)
        # There is no folder of this name, and no other replica any more.
        thawed = run(NAME, where | {"snapshot": snapshot})
    print(f"{'':>20}  {'cold':>7}  {'thawed':>7}")
    for stage in cold[2]:
        print(f"{stage:>20}  {cold[2][stage]:6.2f}s  {thawed[2][stage]:6.2f}s")
    assert thawed[1]["loads"] == {"loaded": 1}, "it did not load from the snapshot"
    assert cold[0] == thawed[0], "the engines generate different tokens"
    print(f"thawed from {thawed[1]['source']}: both generate {cold[0][:8]} ...")


if __name__ == "__main__":
    main()
