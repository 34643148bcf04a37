"""The shards that a rank has of a module whose parameters are DTensors, as FSDP2 makes them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mx.api.tensors import live_tensors
from mx.errors import ConfigError
from mx.memory.tensors import TORCH_DTYPES
from mx.trainers.pieces import TensorForm, cut

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class LocalShards(NamedTuple):
    """What a rank has: the pieces by their names, views of its own memory; and the forms and ties
    of all of the model's tensors, as far as the rank knows them."""

    pieces: dict[str, torch.Tensor]
    tensors: dict[str, TensorForm]
    ties: dict[str, str]


def has_dtensors(what: Any) -> bool:
    """Return True if some of a module's or a mapping's tensors are DTensors; anything else has
    none."""
    if isinstance(what, torch.nn.Module):
        reshard(what)
        what = live_tensors(what)()
    return isinstance(what, Mapping) and any(isinstance(each, DTensor) for each in what.values())


def reshard(module: torch.nn.Module) -> None:
    """Have a module's parameters be its shards: after a forward pass FSDP2 leaves those of its root
    gathered, in memory that is not what the optimizer writes to."""
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def local_shards(what: Any) -> LocalShards:
    """Return the shards that this rank has of a module or a state dict.

    Tensors that are no DTensors are taken to be the same on all ranks.

    Args:
        what: The module or the state dict. Its tensors' memory is not copied.

    Raises:
        ConfigError: A tensor is sharded so that this rank's part of it is no run of rows, or its
            values are partial sums; or its memory is not in the order of its elements.
    """
    found = LocalShards({}, {}, {})
    names: dict[tuple[int, TensorForm, int], str] = {}  # of tensors, by what ties share
    # Of tensors that share memory the least name is the tensor's, as in a layout.
    for name, tensor in sorted(live_tensors(what)().items()):
        form, begin, local = _local(name, tensor)
        if local.numel():
            first = names.setdefault((local.data_ptr(), form, begin), name)
        else:  # ties are seen by the ranks that have a part of the tensors, and by objects
            first = names.setdefault((id(tensor), form, begin), name)
        if first != name:
            found.ties[name] = first
            continue
        found.tensors[name] = form
        flat, item = local.view(-1), local.element_size()
        for piece in cut(name, begin, begin + flat.numel() * item, form.nbytes):
            low, high = ((each - begin) // item for each in piece[1:])
            found.pieces[piece.name] = flat[low:high]
    if not found.pieces:
        raise ConfigError("this rank holds no part of any tensor", hint="shard over fewer ranks")
    return found


def _local(name: str, tensor: Any) -> tuple[TensorForm, int, torch.Tensor]:
    """Return a tensor's global form, and where this rank's part begins in it, in bytes."""
    shape, local, offsets = tuple(tensor.shape), tensor, (0,) * tensor.dim()
    if isinstance(tensor, DTensor):
        if any(each.is_partial() for each in tensor.placements):
            raise ConfigError(
                f"{name} holds partial sums ({tensor.placements})",
                hint="redistribute it to Shard(0) or Replicate before it is served",
            )
        with torch.no_grad():
            local = tensor.to_local()
        chunks: Any = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
        if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
            raise _not_rows(name, tensor)
        offsets = tuple(chunks[0].offsets)
    dtype = _NAMES.get(local.dtype)
    if dtype is None:
        raise ConfigError(f"{name} is {local.dtype}, which no checkpoint has")
    if not local.is_contiguous():
        raise ConfigError(
            f"{name}: its memory is not in the order of its elements", hint="make it contiguous"
        )
    form = TensorForm(dtype, shape)
    if not local.numel():
        return form, 0, local.detach()
    sizes = tuple(local.shape)
    inner = len(shape)  # the dimensions from here on are whole
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    if any(size != 1 for size in sizes[: max(0, inner - 1)]):
        raise _not_rows(name, tensor)
    row_numel = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    at = sum(offset * numel for offset, numel in zip(offsets, row_numel, strict=True))
    return form, at * local.element_size(), local.detach()


def _not_rows(name: str, tensor: DTensor) -> ConfigError:
    return ConfigError(
        f"{name} is sharded as {tensor.placements}: a rank's part of it is no run of rows",
        hint="shard it along its first dimension, as fully_shard does",
    )


def rank_of_process() -> tuple[int, int]:
    """Return this process's rank, and how many there are. Raises ConfigError if it has none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigError(
            "this process has no rank", hint="call torch.distributed.init_process_group first"
        )
    return dist.get_rank(), dist.get_world_size()
