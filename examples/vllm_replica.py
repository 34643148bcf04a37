"""Two replicas of vLLM: the second starts from the first, with no weights on disk.

    make setup-vllm && .venv-vllm/bin/python examples/vllm_replica.py

The first replica reads a small checkpoint from disk and lends what it loaded. The second knows
only the model's name: configuration and weights come from the first. Both generate the same.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import children

NAME = "example-llama"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def write_checkpoint(folder: Path) -> None:
    """Write a small Llama with random weights, as any checkpoint would be."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def replica(model: str, coordinator: str, conn: Connection) -> None:
    """Run one engine: send what it generates, and what it loaded, and stay until told to end."""
    children.end_with()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is this process
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import torch
    from vllm import LLM, SamplingParams

    # vLLM 0.32 computes attention with AMX where the CPU has it, and asks the kernel for its
    # registers nowhere: SIGILL, unless something else in the process has asked.
    torch.cpu._init_amx()
    llm = LLM(
        model=model,
        load_format="mx-peer",
        model_loader_extra_config={"model": NAME, "coordinator": coordinator},
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
    )
    parameters = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": [1, 5, 9]}], parameters, use_tqdm=False)
    conn.send((list(made[0].outputs[0].token_ids), llm.collective_rpc("mx_peer_status")[0]))
    conn.recv()
    llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
    """Run a coordinator, and yield its address."""
    program = Path(sys.executable).with_name("mx-coordinator")
    command = children.command(program, "--listen", "127.0.0.1:0", "--json", "--log-level", "error")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())["listen"]
        finally:
            process.terminate()


@contextlib.contextmanager
def running(model: str, address: str) -> Iterator[tuple[list[int], dict[str, object]]]:
    """Run a replica, and yield what it generates and what it loaded."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=replica, args=(model, address, there))
    process.start()
    there.close()  # the replica's, so that its end is seen
    try:
        tokens, status = here.recv()
        print(f"{model}: loads {status['loads']}, {status['lending']}")
        yield tokens, status
    finally:
        with contextlib.suppress(OSError):
            here.send("end")
        process.join()


def main() -> None:
    children.end_on_signals()
    with tempfile.TemporaryDirectory() as scratch, coordinator() as address:
        checkpoint = Path(scratch, "checkpoint")
        write_checkpoint(checkpoint)
        # There is no folder of the second one's name: all comes from the first.
        with running(str(checkpoint), address) as first, running(NAME, address) as second:
            assert second[1]["loads"] == {"loaded": 1}, "it did not load from the first replica"
            assert first[0] == second[0], "the replicas generate different tokens"
    print(f"both replicas generate {first[0][:8]} ...")


if __name__ == "__main__":
    main()
