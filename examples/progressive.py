"""A model of transformers computes its first token while its weights arrive.

    python examples/progressive.py [--rate 25MB/s]

A source in another process sends at most RATE. The model is used twice: once when all weights are
here, once at once; the tokens are the same.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

import mx
from mx.engines.transformers import load, loading

LAYERS, WIDTH, VOCABULARY, PROMPT = 12, 512, 4000, 384


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
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def serve(folder: str, rate: str, conn: Connection) -> None:
    """Serve the model until the other process has had enough."""
    with mx.serve(folder, model="small-llama", max_bandwidth=rate) as source:
        conn.send(source.coordinator_address)
        conn.recv()


def first_token(coordinator: str, *, progressive: bool) -> tuple[float, torch.Tensor]:
    """Load the model, and return when its first token was there, and the token's logits."""
    began_s = time.monotonic()
    model: Any = load("small-llama", coordinator=coordinator, transport="tcp")
    print(f"  {time.monotonic() - began_s:6.2f} s  the model is built")

    def arrived(event: Any) -> None:
        print(f"  {time.monotonic() - began_s:6.2f} s  {event.name} has arrived", flush=True)

    def computed(number: int) -> Any:
        def report(*_: object) -> None:
            print(f"  {time.monotonic() - began_s:6.2f} s  layer {number} has computed", flush=True)

        return report

    if not progressive:
        loading(model).wait()
        print(f"  {time.monotonic() - began_s:6.2f} s  all {LAYERS} layers have arrived")
    else:
        loading(model).on_layer(arrived)
    hooks = [
        layer.register_forward_hook(computed(number))
        for number, layer in enumerate(model.model.layers)
        if progressive
    ]
    with torch.no_grad():
        logits = model(torch.arange(PROMPT)[None], logits_to_keep=1).logits
    seconds = time.monotonic() - began_s
    print(f"  {seconds:6.2f} s  the first token", flush=True)
    for hook in hooks:
        hook.remove()
    loading(model).wait()
    return seconds, logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="25MB/s")
    rate = parser.parse_args().rate
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        source = spawn.Process(target=serve, args=(folder, rate, there))
        source.start()
        coordinator = here.recv()
        print("when all weights are here:")
        after_s, expected = first_token(coordinator, progressive=False)
        print("at once:")
        at_once_s, found = first_token(coordinator, progressive=True)
        here.send("enough")
        source.join()
    assert torch.equal(found, expected), "the tokens differ"
    print(f"first token after {at_once_s:.2f} s instead of {after_s:.2f} s, the same bit for bit")


if __name__ == "__main__":
    main()
