"""The demo's verdict: it must say no when a single weight differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mx.operations.demo.models import Reference, bundled


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(path / "model.safetensors"))


def test_a_model_is_compared_by_its_output(llama: Path) -> None:
    reference = Reference(llama)
    same = reference.compare(weights(llama))
    assert same.same
    assert "LlamaForCausalLM" in same.how
    changed = weights(llama)
    changed["model.layers.1.mlp.up_proj.weight"][0] += 1
    assert not reference.compare(changed).same
    missing = weights(llama)
    del missing["model.layers.0.self_attn.q_proj.weight"]
    assert not reference.compare(missing).same


def test_where_nothing_can_be_run_tensors_are_compared(llama: Path) -> None:
    (llama / "config.json").unlink()
    reference = Reference(llama)
    same = reference.compare(weights(llama))
    assert same.same
    assert "byte for byte" in same.how
    changed = weights(llama)
    changed["lm_head.weight"][0, 0] += 1
    assert not reference.compare(changed).same
    assert "lm_head.weight" in reference.compare(changed).how


def test_nans_scalars_and_empty_tensors_compare_as_bytes(tmp_path: Path) -> None:
    file = tmp_path / "odd.safetensors"
    odd = {
        "nan": torch.full((3,), float("nan")),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False]),
    }
    save_file(odd, file)
    assert Reference(file).compare(odd).same
    assert not Reference(file).compare({**odd, "empty": torch.empty(0, 5)}).same


def test_code_in_a_folder_is_not_run(llama: Path) -> None:
    config = (llama / "config.json").read_text()
    (llama / "config.json").write_text(
        config.replace("{", '{"auto_map": {"AutoModel": "evil.Model"},', 1)
    )
    (llama / "evil.py").write_text("raise SystemExit('was run')\n")
    assert "byte for byte" in Reference(llama).compare(weights(llama)).how


def test_the_bundled_model_is_found() -> None:
    example = bundled()
    assert example is not None
    assert (example.path / "model.safetensors").stat().st_size > 90_000_000
