"""Pins that earlier releases printed name the same folders still, unless what is odd in them does
travel by now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.crafted import crafted
from tests.support.folders import manifest_of, written

A = ("a.weight", "F32", [2, 3], bytes(range(24)))
B = ("b.weight", "BF16", [4], bytes(range(8)))
SIDE = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "README.md": b"# hello",
    "merges.txt": "é".encode(),
    "1_Pooling/config.json": b"{}",
    "spiece.model": b"\x0a\x0e",
}
INDEX = {"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}
LEFT_OUT = {"modeling.py": b"x", ".gitattributes": b"x", "pytorch_model.bin": b"\x80", "x.h5": b"x"}
FOLDERS = {
    "one file": {"model.safetensors": crafted([A, B])},
    "with files": {"model.safetensors": crafted([A, B]), **SIDE},
    "with what is left out": {"model.safetensors": crafted([A, B]), **SIDE, **LEFT_OUT},
    "shards": {
        "model-1.safetensors": crafted([A]),
        "model-2.safetensors": crafted([B]),
        "model.safetensors.index.json": json.dumps(INDEX).encode(),
        **SIDE,
    },
    "files without an index": {"x.safetensors": crafted([A]), "y.safetensors": crafted([B])},
    "an adapter": {"adapter_model.safetensors": crafted([A]), "adapter_config.json": b"{}"},
}
#: The identity and the pin of each, as a release before companions has printed them.
PINS = {
    "one file": (
        "55db084b6ab2e404952e2b05a2fd2daa24db353eccaea824d696d5d46504d0a7",
        "9c28d4f3bbd1f17d7e238513cf7a788f017d962eddcbace80983b53ecd3f44d6",
    ),
    "with files": (
        "55db084b6ab2e404952e2b05a2fd2daa24db353eccaea824d696d5d46504d0a7",
        "2c629a4f64c43c45e703392eeead113fb47fec7cb6f9d71037ca373a9b1002e3",
    ),
    "with what is left out": (
        "55db084b6ab2e404952e2b05a2fd2daa24db353eccaea824d696d5d46504d0a7",
        "2c629a4f64c43c45e703392eeead113fb47fec7cb6f9d71037ca373a9b1002e3",
    ),
    "shards": (
        "55db084b6ab2e404952e2b05a2fd2daa24db353eccaea824d696d5d46504d0a7",
        "3c5f44b77dd14d14d140e31a79ba396ad9014f734dd40472af68301e919758f7",
    ),
    "files without an index": (
        "55db084b6ab2e404952e2b05a2fd2daa24db353eccaea824d696d5d46504d0a7",
        "46483189ae9ec1b820bbb42ee9b5499342ecdc68b7963cea79b218be3ac6c4bd",
    ),
    "an adapter": (
        "9dda21c84c51f347ba6292eb42a391c8e3eb84907b339fa481e4588c90a18dea",
        "79b13f391de19944e936283ffd003e9e5b876bcb986748c219f86b4226cf573e",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_pins_hold(name: str, tmp_path: Path) -> None:
    ref = manifest_of(written(tmp_path, FOLDERS[name])).ref
    assert (ref.identity.hex(), ref.pin.hex()) == PINS[name]
