"""The ranks of a trainer: processes that hold a small model sharded by FSDP2, and evaluate what a
test asks of all of them at the same time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tests.support.commands import environment

#: Widths of linear layers: more than a block each, and no whole number of blocks or rows.
WIDTHS = (1000, 600, 1000)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Ranks:
    """Such processes."""

    def __init__(self, count: int, seed: int = 0, kind: str = "tests.support.trainer:Rank") -> None:
        code = f"from tests.support.trainer import run_rank; run_rank({kind!r})"
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "SEED": str(seed)}
        shared["MASTER_PORT"] = str(free_port())
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(RANK=str(rank), OMP_NUM_THREADS="1", **shared),
            )
            for rank in range(count)
        ]

    def tell(self, expression: str, *ranks: int) -> None:
        """Have ranks, by default all, evaluate this; `answers` waits for what they find."""
        for rank in ranks or range(len(self.processes)):
            stdin = self.processes[rank].stdin
            assert stdin is not None
            stdin.write(expression.replace("\n", " ") + "\n")
            stdin.flush()

    def answers(self, *ranks: int) -> list[Any]:
        """Return what ranks found, by default all."""
        found = []
        for rank in ranks or range(len(self.processes)):
            stdout = self.processes[rank].stdout
            assert stdout is not None
            line = stdout.readline()
            assert line, f"rank {rank} has ended"
            found.append(json.loads(line))
            assert not isinstance(found[-1], dict) or "error" not in found[-1], found[-1]
        return found

    def ask(self, expression: str, *ranks: int) -> list[Any]:
        self.tell(expression, *ranks)
        return self.answers(*ranks)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].wait()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            with process:
                pass


@contextmanager
def ranks(count: int, seed: int = 0) -> Iterator[Ranks]:
    """Such processes, which are killed in the end."""
    made = Ranks(count, seed)
    try:
        yield made
    finally:
        made.close()


# -- in these processes ----------------------------------------------------------------------------


def run_rank(kind: str) -> None:
    """Be a rank: evaluate expressions, with an object of "module:class" as `rank`."""
    from importlib import import_module

    import torch.distributed as dist

    from mx.errors import MxError

    dist.init_process_group("gloo")
    module, _, name = kind.partition(":")
    rank = getattr(import_module(module), name)()
    scope: dict[str, Any] = {"rank": rank, "number": dist.get_rank()}
    for line in sys.stdin:
        try:
            answer = eval(line, scope)
        except MxError as error:
            answer = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    os._exit(0)


class Rank:
    """One rank's model, and what it serves."""

    def __init__(self) -> None:
        import torch
        from torch.distributed.fsdp import fully_shard

        torch.set_num_threads(1)
        torch.manual_seed(int(os.environ["SEED"]))
        layers: list[torch.nn.Module] = [
            torch.nn.Linear(near, far) for near, far in pairwise(WIDTHS)
        ]
        self.model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(WIDTHS[-1]))
        self.model.register_buffer("scale", torch.full((3,), 2.0))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.source: Any = None

    def serve(self, name: str, coordinator: str, **more: Any) -> str:
        """Lend this rank's shards; return what is served."""
        import mx

        self.source = mx.serve(self.model, model=name, coordinator=coordinator, copy=False, **more)
        return str(self.source.model)

    def close(self) -> None:
        """Serve nothing any more."""
        source, self.source = self.source, None
        if source is not None:
            source.close()

    def step(self, seed: int, *, fails: bool = False) -> str:
        """Change the parameters, all ranks in the same way."""
        import torch

        try:
            with self.source.changing(), torch.no_grad():
                if fails:
                    raise ValueError("in the block")
                for number, each in enumerate(self.model.parameters()):
                    local = each.to_local()  # type: ignore[attr-defined]
                    local.copy_(torch.full_like(local, seed + number / 8))
        except ValueError as error:
            return str(error)
        return str(self.source.model)

    def whole(self, path: str) -> None:
        """Write the model as a checkpoint, as the first rank gathers it."""
        import torch.distributed as dist
        from safetensors.torch import save_file

        tensors = {
            name: getattr(each, "full_tensor", lambda each=each: each)()
            for name, each in self.model.state_dict().items()
        }
        if dist.get_rank() == 0:
            save_file({name: each.contiguous() for name, each in tensors.items()}, path)

    def meshes(self, name: str, coordinator: str) -> list[list[int]]:
        """Lend tensors that are sharded in several ways over a mesh of 2 x 2, and return the first
        of each one's elements, and how many there are."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        import mx

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        rows, same = Shard(0), Replicate()
        placed = {
            "both": (rows, rows),
            "outer": (rows, same),
            "inner": (same, rows),
            "copied": (same, same),
        }
        shapes = [(7, 100_003), (3, 5), (1, 300_000), (5,), ()]
        tensors: dict[str, torch.Tensor] = {"plain": torch.arange(9.0)}
        for kind, placements in placed.items():
            for number, shape in enumerate(shapes):
                if not shape and kind != "copied":
                    continue
                numel = torch.Size(shape).numel()
                values = torch.arange(numel, dtype=torch.float32).reshape(shape) + len(tensors)
                tensors[f"{kind}.{number}"] = distribute_tensor(values, mesh, placements)
        tensors["tied"] = tensors["both.0"]
        self.tensors = tensors
        self.source = mx.serve(tensors, model=name, coordinator=coordinator, copy=False)
        return [[int(n) for n in each.shape] for each in tensors.values()]

    def refused(self, kind: str) -> str:
        """Try to serve what can't be served."""
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

        import mx

        mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
        columns = distribute_tensor(torch.ones(4, 8), mesh, [Shard(1)])
        sums = DTensor.from_local(torch.ones(4, 8), mesh, [Partial()])
        rows = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
        made = {"columns": columns, "sums": sums}.get(kind, rows)
        variant = "mine" if kind == "variant" else ""
        mx.serve({"w": made}, model="refused", variant=variant, copy=kind == "copy")
        return "served"
