"""A replica that need not compile: the compile caches of its model come with the weights.

    python examples/compile_cache.py

A publisher runs a replica once, records what `torch.compile` compiles in it, and signs that. Then
one replica starts without it, and another, in a folder of its own, with what a source serves.
Coordinator, keys and trust file are made in a temporary folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import children

NAME = "example-blocks"


def write_checkpoint(folder: Path) -> None:
    """Write a small Llama of two blocks with random weights, as any checkpoint would be."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def replica(address: str, trust: str) -> None:
    """Load the model from its source, compile it, and print what it computes and how long it took.

    Args:
        address: The coordinator's.
        trust: The trust file; "" for no compile caches.
    """
    import torch

    from mx.engines.transformers import compile_counts, load

    began_s = time.monotonic()
    model = load(NAME, coordinator=address, compile=True, trust=trust or None)
    with torch.no_grad():
        logits = model(torch.arange(16)[None], use_cache=False).logits
        seconds = time.monotonic() - began_s
    found = {
        "seconds": seconds,
        "sum": float(logits.sum()),
        "caches": [state for state, count in compile_counts().items() if count],
    }
    print(json.dumps(found), flush=True)


def mx_command(*arguments: str | Path) -> str:
    """Run a command of mx, and return what it writes."""
    program = Path(sys.executable).with_name("mx")
    command = children.command(program, *arguments)
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[dict[str, str]]:
    """Run a daemon of mx, and yield the object that it prints when it is ready."""
    program = Path(sys.executable).with_name(str(command[0]))
    quiet = ("--json", "--log-format", "text", "--log-level", "error")
    line = children.command(program, *command[1:], *quiet)
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def started(address: str, scratch: Path, name: str, trust: str = "") -> dict[str, object]:
    """Run a replica in a process and with caches of its own, and return what it prints."""
    own = {"TORCHINDUCTOR_CACHE_DIR": str(scratch / name), "XDG_CACHE_HOME": str(scratch / name)}
    command = children.command(sys.executable, __file__, "replica", address, trust)
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **own}
    )
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


def main() -> None:
    children.end_on_signals()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as daemons:
        scratch = Path(folder)
        write_checkpoint(scratch / "checkpoint")
        coordinator = daemons.enter_context(running("mx-coordinator", "--listen", "127.0.0.1:0"))
        address = coordinator["listen"]
        at = ("--coordinator", address)
        daemons.enter_context(running("mx", "serve", scratch / "checkpoint", "--model", NAME, *at))

        key, caches, package = (scratch / each for each in ("key", "caches", "caches.safetensors"))
        public = json.loads(mx_command("artifacts", "keygen", key, "--json"))["key"]
        trust = scratch / "trust.toml"
        trust.write_text(f'[[signer]]\nname = "me"\nkey = "{public}"\nmodels = ["example-*"]\n')
        trust.chmod(0o600)
        print("a publisher records what a replica compiles ...", flush=True)
        worker = [sys.executable, __file__, "replica", address, ""]
        mx_command("artifacts", "record", caches, "--", *worker)
        mx_command("artifacts", "publish", caches, "--model", NAME, "--key", key, "--out", package)

        before = started(address, scratch, "before")
        print(f"before: loaded, compiled and computed in {before['seconds']:.1f} s", flush=True)
        daemons.enter_context(running("mx", "serve", "--artifacts", package, *at))
        after = started(address, scratch, "after", str(trust))
        ratio = after["seconds"] / before["seconds"]
        print(
            f"after: {after['seconds']:.1f} s, {ratio:.2f} x; the shipped caches: "
            f"{', '.join(after['caches'])}"
        )
        assert after["sum"] == before["sum"], "the replicas compute different values"


if __name__ == "__main__":
    replica(*sys.argv[2:]) if sys.argv[1:2] == ["replica"] else main()
