"""An engine's own process lends the weights that it computes with, and goes on computing.

    python examples/serve_in_engine.py

A second process starts from them: it builds the model without weights, has its parameters and
buffers filled in place, and generates the same text. Then the first process merges an adapter into
its weights. They are withdrawn meanwhile, and are a new revision afterwards.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import children
import torch
import transformers

import mx

CONFIG = transformers.LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
)
#: What tells these weights from others of the same model, such as those of another dtype.
KEY = mx.ProcessingKey(engine="transformers", version=transformers.__version__, dtype="fp32")


@torch.no_grad()
def generate(model: transformers.LlamaForCausalLM, count: int = 16) -> list[int]:
    """Return the tokens that follow a prompt."""
    tokens = torch.tensor([[1, 5, 9]])
    for _ in range(count):
        best = model(tokens).logits[0, -1].argmax()
        tokens = torch.cat([tokens, best.view(1, 1)], dim=1)
    return tokens[0, 3:].tolist()


def replica(coordinator: str, conn: Connection) -> None:
    """Start from the engine's weights, each time that it says so, and return what they generate."""
    children.end_with()
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(CONFIG).eval()
    model.to_empty(device="cpu")
    while conn.recv():
        with mx.pull("engine", variant=KEY, into=model, coordinator=coordinator) as pull:
            report = pull.wait()
            revision = pull.model.revision
        print(
            f"replica: filled its own tensors with {report.bytes / 1e6:.1f} MB\n  of revision "
            f"{revision} in {report.seconds:.2f} s by {report.paths[0].transport}",
            flush=True,
        )
        conn.send((revision, generate(model)))


def merge_adapter(model: transformers.LlamaForCausalLM, rank: int = 4) -> None:
    """Add a low-rank product to the weights of each layer's output projection."""
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        down, up = torch.randn(rank, weight.shape[1]), torch.randn(weight.shape[0], rank)
        weight.data.add_(up @ down, alpha=0.05)


def main() -> None:
    children.end_on_signals()
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    with mx.serve(
        model, model="engine", variant=KEY, copy=False, non_persistent_buffers=True, max_readers=2
    ) as source:
        here, there = multiprocessing.Pipe()
        print("engine: lends its weights where they are in its memory", flush=True)
        reader = multiprocessing.get_context("spawn").Process(
            target=replica, args=(source.coordinator_address, there), daemon=True
        )
        reader.start()
        there.close()  # the replica's, so that its end is seen

        here.send(True)
        tokens = generate(model)  # the engine serves its users meanwhile
        print(f"engine: generated {len(tokens)} tokens while the replica starts", flush=True)
        assert here.recv() == ("main", tokens), "the replica generates something else"

        print("engine: withdraws the weights, and merges an adapter into them", flush=True)
        with source.changing():
            merge_adapter(model)
        print(f"engine: lends them again, as revision {source.model.revision}", flush=True)
        merged = generate(model)
        assert merged != tokens, "the adapter changed nothing"
        here.send(True)
        assert here.recv() == (source.model.revision, merged), "the replica has other weights"

        here.send(False)
        reader.join()
    print(f"both generated the same, before the adapter and with it ({source.model.revision})")


if __name__ == "__main__":
    main()
