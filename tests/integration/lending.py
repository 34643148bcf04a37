"""A module as engines have them, and a process that lends one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mx import api, config
from mx.errors import CoordinatorError
from mx.transport import TlsFiles
from tests.support import forkserver
from tests.support.commands import Command, Run, environment, free_port

WIDE, DEEP = 384, 6


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up = nn.Linear(wide, 2 * wide, bias=True)
        # As an engine leaves it after loading: the transposed view of what it computes with.
        self.turned = nn.Parameter(torch.empty(wide, wide).t())
        self.filters = nn.Parameter(
            torch.empty(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        )
        self.none = nn.Parameter(torch.empty(0, wide))
        self.register_buffer("scale", torch.empty(1).expand(3))
        self.register_buffer("cell", torch.empty(1))
        self._buffers["scale"] = self._buffers["cell"].expand(3)  # type: ignore[union-attr]
        self.register_buffer("rotary", torch.empty(17), persistent=False)


class Net(nn.Module):
    """Tied, transposed, channels-last, empty and expanded tensors, buffers of both kinds."""

    def __init__(self, wide: int = WIDE, deep: int = DEEP) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, wide)
        self.layers = nn.ModuleList(Block(wide) for _ in range(deep))
        self.head = nn.Linear(wide, 1000, bias=False)
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight
        for block in self.layers:
            block._buffers["scale"] = block._buffers["cell"].expand(3)  # type: ignore[union-attr]


def net(seed: int, wide: int = WIDE, deep: int = DEEP) -> Net:
    """A module whose every byte the seed decides."""
    made, generator = Net(wide, deep), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in everything(made).values():
            if tensor.is_floating_point() and 0 not in tensor.stride():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        made.steps.fill_(seed)  # type: ignore[operator]
    return made


def small_tensors(seed: int, count: int) -> dict[str, torch.Tensor]:
    """Tensors of 17 to 23 bytes, in another order in memory than in the model."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randint(0, 256, (count * 24,), dtype=torch.uint8, generator=generator)
    return {
        f"model.layers.{i % 50}.mlp.w{i}": pool[24 * at : 24 * at + 17 + i % 7]
        for i, at in enumerate(torch.randperm(count, generator=generator).tolist())
    }


def everything(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by each of its names."""
    found = dict(module.named_parameters(remove_duplicate=False))
    return {k: v.detach() for k, v in (found | dict(module.named_buffers())).items()}


def equal(one: nn.Module, other: nn.Module) -> bool:
    left, right = everything(one), everything(other)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in everything(module).items()}


def pss_bytes(pid: int | str = "self") -> int:
    """What a process holds of memory; shared pages count by their share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Pss")


class Lender(Command):
    """`main` in a process of its own. Standard output: a line of JSON once it is listed."""

    def __init__(self, coordinator: str, **options: Any) -> None:
        self._options = json.dumps({"coordinator": coordinator, **options})
        super().__init__(env=environment())
        self.until(lambda: self.out.endswith("}\n"), "the lender's line")
        self.said = json.loads(self.out)

    def _code(self) -> str:
        return f"from tests.integration.lending import main; main({self._options!r})"

    def command(self, entry: str) -> list[str]:
        return [sys.executable, "-c", self._code()]

    def fork(
        self, entry: str, arguments: Sequence[str], env: dict[str, str]
    ) -> forkserver.Forked | None:
        return forkserver.coded(self._code(), (), env, "torch")


@contextmanager
def lender(coordinator: str, **options: Any) -> Iterator[Lender]:
    """A process that lends `net(seed)`.

    Args:
        coordinator: Where it registers.
        options: `seed`, `wide`, `deep`; `small` lends so many small tensors in place of that;
            `pull` names a model to pull into the module and to hold; the rest goes to `serve`.
    """
    process = Lender(coordinator, **options)
    try:
        yield process
    finally:
        process.end()


def main(text: str) -> None:
    """The lender's process."""
    options = json.loads(text)
    seed = options.pop("seed", 1)
    module = net(seed, options.pop("wide", WIDE), options.pop("deep", DEEP))
    small = options.pop("small", 0)
    weights: Any = small_tensors(seed, small) if small else module
    state = os.environ["XDG_STATE_HOME"]  # it is of the test's own user
    settings = config.load(environ={"HOME": "/nonexistent", "XDG_STATE_HOME": state})
    settings = replace(settings, **options.pop("settings", {}))
    pulled = options.pop("pull", None)
    before, where = pss_bytes(), pointers(module)
    if pulled is not None:
        held = api.pull(
            pulled,
            coordinator=options.pop("coordinator"),
            into=module,
            hold=True,
            settings=settings,
        )
        source = held.hold()
    else:
        source = api.serve(
            weights, model="m", copy=False, embed=False, settings=settings, **options
        )
    assert pointers(module) == where
    grown = pss_bytes() - before
    print(json.dumps({"grown": grown, "pid": os.getpid(), "key": str(source.model)}), flush=True)
    source.wait()


def tls_settings(settings: config.Settings, files: TlsFiles) -> config.Settings:
    return replace(settings, tls_cert=files.certificate, tls_key=files.key, tls_ca=files.authority)


def tls_coordinator(run: Run, settings: config.Settings) -> str:
    """A coordinator with certificates."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--tls-cert", settings.tls_cert, "--tls-key", settings.tls_key)
    command = run("--listen", address, *flags, "--tls-ca", settings.tls_ca, daemon=True)

    def answers() -> bool:
        try:
            api.list_models(coordinator=address, settings=settings)
        except CoordinatorError:
            return False
        return True

    command.until(answers, "coordinator")
    return address
