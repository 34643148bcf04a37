"""The model of `make starts`: small, with tied weights, and processed as engines process theirs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from tests.starts.schedule import LAYERS

_WIDTH = 512
CONFIG = {"architectures": ["Small"], "model_type": "small", "hidden_size": _WIDTH}


class Block(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm = torch.nn.Parameter(torch.empty(_WIDTH), requires_grad=False)

    def process(self) -> None:
        """Put the weights elsewhere, in another order, with another tensor beside them."""
        weight = self.proj.weight.detach()
        self.proj.register_buffer("scale", weight.abs().amax(1))
        self.proj.weight = torch.nn.Parameter(weight.t().contiguous(), requires_grad=False)


class Small(torch.nn.Module):
    """A model whose output layer is its embedding, about 9 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(_WIDTH, _WIDTH)
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.lm_head = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the model, as engines call it."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            parameters[name].data.copy_(tensor)


@torch.no_grad()
def digest_of(model: torch.nn.Module) -> str:
    """Return a digest of all bytes of a model's parameters and buffers, and of their names."""
    found = hashlib.sha256()
    held: dict[str, torch.Tensor] = {}
    held |= dict(model.named_parameters(remove_duplicate=False))
    held |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in sorted(held.items()):
        shown = f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.is_contiguous()}"
        found.update(shown.encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


@torch.no_grad()
def updated(model: torch.nn.Module) -> None:
    """Change a model's weights where they are, as the updates of the campaign do."""
    for tensor in {id(each): each for each in (*model.parameters(), *model.buffers())}.values():
        tensor.data.add_(1)


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    """Return random weights of a seed."""
    made = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in Small().named_parameters()}
    return {name: torch.rand(shape, generator=made) for name, shape in shapes.items()}


def processed_digest(
    weights: Mapping[str, torch.Tensor], change: Callable[[torch.nn.Module], None] = lambda _: None
) -> str:
    """Return the digest of a model with these weights, once that is processed and then changed."""
    model = Small()
    given = {**weights, "lm_head.weight": weights["embed_tokens.weight"]}
    model.load_weights(given.items())
    for block in model.layers:
        assert isinstance(block, Block)
        block.process()
    change(model)
    return digest_of(model)


def save(folder: Path, seed: int) -> None:
    """Write a checkpoint with the weights of a seed."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights_of(seed), str(folder / "model.safetensors"))
