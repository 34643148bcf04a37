"""A rank of a trainer whose tensors are sharded in random ways; what each holds follows from its
name and the version."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
#: (name of the dtype, shape, placements by the mesh's dimensions: "S" rows, "R" copied; "" for a
#: tensor that is no DTensor), by the tensor's name.
Drawn = dict[str, tuple[str, list[int], str]]


def drawn(seed: int, ranks: int) -> Drawn:
    """Draw the tensors of a model."""
    rng = random.Random(seed)
    dims = 2 if ranks == 4 and rng.random() < 0.5 else 1
    found: Drawn = {"first": ("float32", [8], "S" * dims)}  # each rank has something
    for number in range(rng.randrange(1, 9)):
        shape = [rng.choice([1, 2, 3, 5, 7, 64, 1000]) for _ in range(rng.randrange(4))]
        if shape and rng.random() < 0.3:
            shape[0] = rng.randrange(1, 400_000) // max(1, int(np.prod(shape[1:])))
        placed = "".join(rng.choice("SSR") for _ in range(dims)) if rng.random() < 0.9 else ""
        placed = placed if shape else "R" * len(placed)
        found[f"layers.{number // 3}.{number}"] = (rng.choice(list(DTYPES)), shape, placed)
    return found


def values(name: str, version: int, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return what a tensor holds: random bytes, NaNs among them."""
    kind = DTYPES[dtype]
    seed = int.from_bytes(hashlib.sha256(f"{name} {version}".encode()).digest()[:8], "big")
    nbytes = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=kind).element_size()
    if not nbytes:
        return torch.empty(shape, dtype=kind)
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(kind).reshape(shape)


class RandomRank:
    """One of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.source: Any = None

    def serve(self, name: str, coordinator: str, seed: int, version: int) -> str:
        """Lend tensors that are drawn by the seed, as they are in a version."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        import mx

        ranks = dist.get_world_size()
        self.drawn = drawn(seed, ranks)
        two = any(len(placed) == 2 for _, _, placed in self.drawn.values())
        mesh = init_device_mesh("cpu", (2, 2) if two else (ranks,))
        for key, (dtype, shape, placed) in self.drawn.items():
            whole = values(key, version, dtype, shape)
            if placed:
                ways = [Shard(0) if each == "S" else Replicate() for each in placed]
                self.tensors[key] = distribute_tensor(whole, mesh, ways, src_data_rank=None)
            else:
                self.tensors[key] = whole.clone()
        self.source = mx.serve(
            self.tensors, model=name, coordinator=coordinator, copy=False, update=True
        )
        return str(self.source.model)

    def step(self, version: int) -> str:
        """Make the tensors those of a version."""
        from torch.distributed.tensor import DTensor

        with self.source.changing():
            for key, (dtype, shape, _) in self.drawn.items():
                tensor, whole = self.tensors[key], values(key, version, dtype, shape)
                if isinstance(tensor, DTensor):
                    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
                    cut = tuple(
                        slice(begin, begin + size)
                        for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)
                    )
                    tensor, whole = tensor.to_local(), whole[cut]
                if tensor.numel():
                    flat = (each.reshape(-1).view(torch.uint8) for each in (tensor, whole))
                    next(flat).copy_(next(flat))
        return str(self.source.model)
