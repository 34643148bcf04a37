"""A model of transformers computes its first token while its weights arrive.

    python examples/progressive.py [--rate 25MB/s]

A source in another process sends at most RATE, as a slow link would. The model is used twice: once
when all weights are here, once at once; the tokens are the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import children
import torch
import transformers

import mx
from mx.engines.transformers import load, loading

LAYERS, WIDTH, VOCABULARY, PROMPT = 12, 512, 4000, 1024


def make_model(folder: str) -> None:
    """Write a Llama with random weights, some 160 MB."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        vocab_size=VOCABULARY,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    with torch.no_grad():  # what torch does at its first use counts for neither case
        model(torch.arange(PROMPT)[None], logits_to_keep=1)


def serve(folder: str, rate: str, conn: Connection) -> None:
    """Serve the model until the other process has had enough."""
    children.end_with()
    with mx.serve(folder, model="small-llama", max_bandwidth=rate) as source:
        conn.send(source.coordinator_address)
        conn.recv()


def first_token(coordinator: str, *, progressive: bool) -> tuple[float, torch.Tensor]:
    """Load the model, and return when its first token was there, and the token's logits."""
    began_s = time.monotonic()
    arrived_s: dict[str, float] = {}

    def passed_s() -> float:
        return time.monotonic() - began_s

    def say(what: str) -> None:
        print(f"  {passed_s():6.2f} s  {what}", flush=True)

    def computed(number: int, name: str) -> Any:
        def report(*_: object) -> None:
            say(f"layer {number} has computed; it arrived after {arrived_s[name]:.2f} s")

        return report

    model: Any = load("small-llama", coordinator=coordinator, transport="tcp")
    loading(model).on_layer(lambda event: arrived_s.setdefault(event.name, passed_s()))
    hooks = []
    if progressive:
        say("the model is there, without weights, and begins to compute")
        hooks = [
            layer.register_forward_hook(computed(number, f"model.layers.{number}"))
            for number, layer in enumerate(model.model.layers)
        ]
    else:
        loading(model).wait()
        say(f"all {LAYERS} layers have arrived, and it begins to compute")
    with torch.no_grad():
        logits = model(torch.arange(PROMPT)[None], logits_to_keep=1).logits
    seconds = passed_s()
    say("the first token")
    for hook in hooks:
        hook.remove()
    loading(model).wait()
    return seconds, logits


def main() -> None:
    children.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="25MB/s")
    rate = parser.parse_args().rate
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # with more, whatever else runs here decides how long it computes
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        source = spawn.Process(target=serve, args=(folder, rate, there), daemon=True)
        source.start()
        coordinator = here.recv()
        print(
            f"A Llama of {LAYERS} layers and 160 MB comes from a process that sends {rate} at most"
        )
        print(f"(--rate), as over a slow link; its prompt of {PROMPT} tokens takes one thread.")
        print("First it computes when all weights are here:", flush=True)
        after_s, expected = first_token(coordinator, progressive=False)
        print("Then it computes at once, and waits for each layer:", flush=True)
        at_once_s, found = first_token(coordinator, progressive=True)
        here.send("enough")
        source.join()
    assert torch.equal(found, expected), "the tokens differ"
    print(f"First token after {at_once_s:.2f} s instead of {after_s:.2f} s, the same bit for bit.")


if __name__ == "__main__":
    main()
