"""Two replicas of vLLM: one prefills a prompt, and the other one decodes.

    make setup-vllm && .venv-vllm/bin/python examples/prefill_decode.py

The first replica computes the KV blocks of a long prompt, and one token. The second one, which has
its weights from the first, too, takes these blocks, and generates the rest. What it generates is
what the first replica generates alone; how long each waited for its first token is printed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import children
import vllm_replica
from vllm_replica import NAME

PROMPT = [(7 * at + 3) % 500 for at in range(400)]
#: An engine's first request is slower than all others: this one is another prompt.
WARM = [(5 * at + 1) % 500 for at in range(400)]


def replica(model: str, role: str, coordinator: str, conn: Connection) -> None:
    """Run one engine: answer prompts with tokens and seconds until told to end."""
    children.end_with()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is this process
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["MX_PEER_COORDINATOR"] = coordinator
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()  # as in vllm_replica.py
    llm = LLM(
        model=model,
        load_format="mx-peer",
        model_loader_extra_config={"model": NAME},
        kv_transfer_config={
            "kv_connector": "MxConnector",
            "kv_connector_module_path": "mx.engines.vllm.connector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": "64MiB", "wait_s": 30.0},
        },
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    conn.send("ready")
    while (asked := conn.recv()) != "end":
        prompt, count, transfer = asked
        parameters = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        began_s = time.perf_counter()
        (made,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        took_s = time.perf_counter() - began_s
        counts = llm.collective_rpc("mx_peer_status")[0]["kv"]
        conn.send((list(made.outputs[0].token_ids), took_s, made.kv_transfer_params, counts))
    llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def running(model: str, role: str, address: str) -> Iterator[Connection]:
    """Run a replica, and yield the connection that takes prompts."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=replica, args=(model, role, address, there))
    process.start()
    there.close()  # the replica's, so that its end is seen
    try:
        here.recv()
        print(f"{role}: ready")
        yield here
    finally:
        with contextlib.suppress(OSError):
            here.send("end")
        process.join()


def ask(where: Connection, prompt: list[int], count: int, **transfer: Any) -> tuple[Any, ...]:
    """Have a replica complete a prompt; return tokens, seconds, what is passed on, and counts."""
    where.send((prompt, count, transfer))
    return where.recv()


def main() -> None:
    children.end_on_signals()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = stack.enter_context(vllm_replica.coordinator())
        vllm_replica.write_checkpoint(scratch)
        prefills = stack.enter_context(running(str(scratch), "kv_producer", address))
        decodes = stack.enter_context(running(NAME, "kv_consumer", address))
        for where in (prefills, decodes):
            ask(where, WARM, 1)
        # What a proxy between the two does with each request.
        _, computing_s, passed_on, _ = ask(prefills, PROMPT, 1, do_remote_decode=True)
        first, taking_s, _, _ = ask(decodes, PROMPT, 1, **passed_on)
        tokens, _, _, counts = ask(decodes, [*PROMPT, *first], 32)
        alone, *_ = ask(prefills, [*PROMPT, *first], 32)
    blocks = len(PROMPT) // 32
    print(
        f"first token: {computing_s:.3f} s by computing the prompt, {taking_s:.3f} s by taking it"
    )
    assert counts["loaded"] >= blocks and not counts.get("failed"), counts
    assert tokens == alone, "the replicas generate different tokens"
    print(f"{counts['loaded']} blocks were taken; both generate {tokens[:8]} ...")


if __name__ == "__main__":
    main()
