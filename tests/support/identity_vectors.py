"""What tests/vectors/identity.json holds, computed by the second implementation.

python -m tests.support.identity_vectors > tests/vectors/identity.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support import naive_identity as naive
from tests.support.naive_identity import MIB, Alias, Model, Tensor

PATH = Path(__file__).parent.parent / "vectors" / "identity.json"

ABOUT = [
    "Test vectors of docs/identity.md. Digests and documents are in hexadecimal digits.",
    "roots: data is the pattern of this seed, whose byte i is (seed + i + i // 251) mod 256.",
    "models: tensors are [name, dtype, shape, strides, seed of the data], aliases [name, holder, "
    "dtype, shape, offset, strides], files [path, metadata, tensors]; layers are the layout: each "
    "[name, canonical names of its tensors].",
    "cuts: layers are the lengths of their tensors, chunks [layer, begin, end, payload, blocks], "
    "with begin and end in layer space.",
]

LENGTHS = [0, 1, 2, 63, 64, 65, 1023, 1024, 1025, 4096, 65537]
LENGTHS += [n * MIB + more for n in (1, 2, 5) for more in (-1, 0, 1)] + [3 * MIB + 12345]

MODELS: dict[str, dict[str, Any]] = {
    "one byte": {"tensors": [["w", "U8", [1], [], 0]], "layers": [["part.0", ["w"]]]},
    "layers": {
        "tensors": [
            ["model.layers.1.mlp.down.weight", "F32", [512, 512], [], 5],
            ["model.layers.1.mlp.nothing", "F32", [0, 4], [], 0],
            ["model.layers.1.mlp.scale", "F32", [], [], 6],
            ["model.layers.1.mlp.up.weight", "F16", [1048575], [], 4],
            ["model.embed_tokens.weight", "BF16", [1024, 513], [], 1],
            ["model.layers.0.mlp.down.weight", "F32", [512, 512], [], 2],
            ["model.layers.0.mlp.nothing", "F32", [0, 4], [], 0],
            ["model.layers.0.mlp.scale", "F32", [], [], 3],
            ["model.layers.0.mlp.up.weight", "F16", [1048575], [], 4],
            ["model.norm.weight", "BF16", [1024], [], 7],
        ],
        "layers": [
            ["embed", ["model.embed_tokens.weight"]],
            *(
                [
                    f"model.layers.{i}",
                    [
                        f"model.layers.{i}.mlp.{part}"
                        for part in ("down.weight", "nothing", "scale", "up.weight")
                    ],
                ]
                for i in (0, 1)
            ),
            ["head", ["model.norm.weight"]],
        ],
        "files": [
            [
                "model-00001.safetensors",
                [["format", "pt"], ["a", '"\\/\b\t\n\f\r\0\x1f\x7f\u2028é\U0001d54f']],
                ["model.norm.weight", "model.embed_tokens.weight"],
            ],
            [
                "model-00002.safetensors",
                None,
                [
                    f"model.layers.{i}.mlp.{part}"
                    for i in (0, 1)
                    for part in ("up.weight", "scale", "nothing", "down.weight")
                ],
            ],
        ],
        "side_files": [["config.json", 2, naive.digest(b"{}").hex()]],
    },
    "ties": {
        "tensors": [
            ["model.embed_tokens.weight", "F32", [30, 20], [], 1],
            ["permuted", "F32", [4, 5, 1, 6], [1, 24, 1, 4], 2],
            ["row", "BF16", [1, 7], [], 3],
        ],
        "aliases": [
            # The least name of three that view all: it takes the holder's place.
            ["lm_head.weight", "model.embed_tokens.weight", "F32", [30, 20], 0, [20, 1]],
            ["z.weight", "model.embed_tokens.weight", "F32", [30, 20], 0, [20, 1]],
            # Views of a part, of another shape, of another order, and of one element repeated.
            ["a.part", "model.embed_tokens.weight", "F32", [20], 80, [1]],
            ["b.shape", "model.embed_tokens.weight", "F32", [600], 0, [1]],
            ["c.order", "model.embed_tokens.weight", "F32", [20, 30], 0, [1, 20]],
            ["d.repeated", "model.embed_tokens.weight", "F32", [9, 1], 2396, [0, 33]],
            ["e.empty", "model.embed_tokens.weight", "F32", [3, 0], 2400, [5, 2]],
            # All of a permuted tensor; what is said where there is one element does not matter.
            ["p.all", "permuted", "F32", [4, 5, 1, 6], 0, [1, 24, 99, 4]],
            ["a.row", "row", "BF16", [1, 7], 0, [0, 1]],
        ],
        # In the order of the names, those of aliases too.
        "layers": [["part.0", ["lm_head.weight", "a.row", "p.all"]]],
    },
    "packed": {
        "tensors": [
            ["blocks.0.weight", "F4", [5, 524288], [], 1],
            ["blocks.0.scale", "F8_E8M0", [5, 16384], [], 2],
            ["blocks.1.weight", "F6_E2M3", [4, 3], [], 3],
        ],
        "aliases": [["blocks.0.first", "blocks.0.weight", "F4", [524288], 0, [1]]],
        "layers": [
            ["blocks.0", ["blocks.0.weight", "blocks.0.scale"]],
            ["blocks.1", ["blocks.1.weight"]],
        ],
    },
    "names": {
        "tensors": [
            ["\uff5e", "U8", [1], [], 1],
            ["\U0001d54f", "U8", [1], [], 2],
            ["é", "U8", [1], [], 3],
            ["e\u0301", "U8", [1], [], 4],
            ["with space", "U8", [2], [], 5],
            ["Z", "U8", [1], [], 6],
            ['a "layer" \\ named.0.a.w', "U8", [1], [], 7],
        ],
        "aliases": [['a "tied" \\ \U0001d54f', "with space", "U8", [1], 1, [1]]],
        "layers": [
            ['a "layer" \\ named.0', ['a "layer" \\ named.0.a.w']],
            ["head", ["Z", "with space", "e\u0301", "é", "\uff5e", "\U0001d54f"]],
        ],
    },
    "empty": {
        "tensors": [["b", "F64", [2, 0, 3], [], 0], ["a", "F32", [0], [], 0]],
        "layers": [["part.0", ["a", "b"]]],
    },
}

# Lengths of a layer's tensors that meet every border of blocks and chunks.
_SMALL = [1, 255, 256, 257, 0, 100_000]
_NEAR = [MIB - 1, MIB, MIB + 1, 0, 2 * MIB - 256, 256, 3 * MIB, 1]
CUTS: list[tuple[list[list[int]], int]] = [
    ([_SMALL, _NEAR, [0], [5 * MIB + 7]], size * MIB) for size in (1, 2, 3, 16)
]
CUTS += [([[MIB // 2, MIB // 2, 1, 2 * MIB, MIB // 2 + 1]], MIB), ([[1 << 30]], 256 * MIB)]

PAYLOADS = [0, 1, 64 * MIB, 64 * MIB + 1, 128 * MIB, 1 << 30, (1 << 30) + 1, 141 * 10**9]


def model_of(vector: dict[str, Any]) -> Model:
    """Return the model that a vector describes."""
    tensors = [Tensor(*row[:4]) for row in vector["tensors"]]
    for tensor, row in zip(tensors, vector["tensors"], strict=True):
        tensor.data = naive.pattern(row[4], tensor.nbytes)
    layers = [(name, names) for name, names in vector["layers"]]
    aliases = [Alias(*row) for row in vector.get("aliases", [])]
    return Model(tensors, layers, aliases, vector.get("files", []), vector.get("side_files", []))


def _model(name: str, vector: dict[str, Any]) -> dict[str, Any]:
    model = model_of(vector)
    identity, layout = naive.identity_document(model), naive.layout_document(model)
    packaging = naive.packaging_document(model)
    return {
        "name": name,
        **vector,
        "identity_document": identity.hex(),
        "identity": naive.digest(identity).hex(),
        "layout_document": layout.hex(),
        "layout": naive.digest(layout).hex(),
        "packaging_document": packaging.hex(),
        "packaging": naive.digest(packaging).hex() if packaging else "",
        "pin": naive.pin(model).hex(),
        "pages": [naive.page(tensors).hex() for tensors in model.in_layers],
    }


def _cut(layers: list[list[int]], chunk_size: int) -> dict[str, Any]:
    chunks = []
    for layer, lengths in enumerate(layers):
        for blocks in naive.layer_chunks(lengths, chunk_size):
            end = sum(blocks[-1])
            chunks.append([layer, blocks[0][0], end, naive.payload(blocks), len(blocks)])
    return {"layers": layers, "chunk_nbytes": chunk_size, "chunks": chunks}


def _root(seed: int, nbytes: int) -> dict[str, Any]:
    data = naive.pattern(seed, nbytes)
    blocks = [digest.hex() for digest in naive.block_digests(data)]
    return {"seed": seed, "nbytes": nbytes, "blocks": blocks, "root": naive.root(data).hex()}


def vectors() -> dict[str, Any]:
    """Return the contents of the file, computed anew."""
    return {
        "about": ABOUT,
        "roots": [_root(seed, nbytes) for nbytes in LENGTHS for seed in (0, 77)],
        "models": [_model(name, vector) for name, vector in MODELS.items()],
        "cuts": [_cut(layers, size) for layers, size in CUTS],
        "chunk_nbytes": [[n, naive.chunk_size(n)] for n in PAYLOADS],
    }


def stored() -> dict[str, Any]:
    """Return the contents of the file."""
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
