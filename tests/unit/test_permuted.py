"""Tensors in another order than row-major: described, laid out, returned, and written to files."""

from __future__ import annotations

import copy
import errno
import io
import os
import random
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

from benchmarks.roots import root_of
from mx.buffers import address_of
from mx.core.layout import TensorSpec, permuted_stride, plan_layout
from mx.core.manifest import encode
from mx.core.types import Alias, Manifest, Packaging, Tensor
from mx.errors import CapacityError
from mx.memory.tensors import TORCH_DTYPES, state_dict
from mx.storage.row_major import row_major
from mx.storage.safetensors import open_checkpoint
from mx.storage.writer import CheckpointWriter
from tests.support.described import describe

DTYPES = list(TORCH_DTYPES.values())


def served(what: Any) -> tuple[Manifest, memoryview]:
    """Return the manifest and the arena of a source of these tensors."""
    specs, aliases, views = describe(what)
    layout = plan_layout(specs, aliases)
    arena = memoryview(bytearray(b"\xa5" * layout.arena_nbytes))
    for tensor in layout.tensors:
        start = layout.layers[tensor.layer].arena_offset + tensor.offset
        arena[start : start + tensor.nbytes] = views[tensor.name]
    roots = {name: root_of(view) for name, view in views.items()}
    return encode(layout, Packaging(), roots), arena


def identity(what: Any) -> str:
    return served(what)[0].ref.identity.hex()


def bits(tensor: torch.Tensor) -> list[int]:
    """Return the values in row-major order, bit for bit: a NaN differs from itself."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


def check_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name
        order = permuted_stride(tensor.shape, tensor.stride())
        if order is not None:
            assert permuted_stride(found[name].shape, found[name].stride()) == order, name


def check_written(out: Path, expected: Mapping[str, torch.Tensor]) -> None:
    """Compare a file with tensors, as the safetensors package reads it."""
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == expected.keys()
        for name, tensor in expected.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name


def written(manifest: Manifest, arena: memoryview, out: Path) -> None:
    """Write as a pull does, and check that each layer is read back as it was."""
    with CheckpointWriter(out, manifest) as writer:
        for layer in manifest.layout.layers:
            space = arena[layer.arena_offset : layer.arena_offset + layer.nbytes]
            writer.write_layer(layer.index, space)
            again = memoryview(bytearray(b"\xa5" * layer.nbytes))
            writer.read_layer(layer.index, again)
            assert again == space
        writer.commit()


def random_tensor(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = 1
    for dimension in shape:
        count *= dimension
    data = random.Random(seed).randbytes(count * dtype.itemsize)
    if dtype is torch.bool:
        data = bytes(byte & 1 for byte in data)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A dense tensor, its dimensions stored in any order."""
    shape = draw(st.lists(st.integers(0, 4) | st.integers(1, 9), max_size=5))
    made = random_tensor(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    return made.permute(draw(st.permutations(range(len(shape)))))


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view of a tensor: slices, other orders, repeated dimensions, the conjugate."""
    view = base
    for _ in range(draw(st.integers(0, 3))):
        dimension = draw(st.integers(0, max(view.dim() - 1, 0)))
        kinds = ["permute", "expand", "again"]
        if view.dim():
            kinds += ["slice", "step", "select", "split"]
        if view.is_complex():
            kinds += ["conj"]
        kind = draw(st.sampled_from(kinds))
        if kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "expand":
            view = view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)
        elif kind == "slice" and view.shape[dimension]:
            low = draw(st.integers(0, view.shape[dimension] - 1))
            length = draw(st.integers(0, view.shape[dimension] - low))
            view = view.narrow(dimension, low, length)
        elif kind == "step":
            view = view[(slice(None),) * dimension + (slice(None, None, 2),)]
        elif kind == "select" and view.shape[dimension]:
            view = view.select(dimension, draw(st.integers(0, view.shape[dimension] - 1)))
        elif kind == "split":
            view = view.unsqueeze(dimension)
        elif kind == "conj":
            view = view.conj()
    return view


@st.composite
def models(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors, some of which share memory, in any order."""
    found: dict[str, torch.Tensor] = {}
    for number in range(draw(st.integers(1, 3))):
        base = draw(tensors())
        group = {"whole": base} if draw(st.booleans()) else {}
        for index in range(draw(st.integers(0, 4))):
            group[f"view{index}"] = draw(views(base))
        names = draw(st.permutations(sorted(group)))
        for name, tensor in zip(names, group.values(), strict=True):
            found[f"layers.{number}.{name}"] = tensor
    order = draw(st.permutations(sorted(found)))
    return {name: found[name] for name in order} or {"alone": torch.zeros(())}


@given(tensors())
def test_a_dense_tensor_is_returned_in_the_order_in_which_it_was_stored(
    tensor: torch.Tensor,
) -> None:
    (spec,), aliases, bytes_of = describe({"w": tensor})
    assert spec.stride == permuted_stride(tensor.shape, tensor.stride())
    assert aliases == []
    if tensor.numel():
        assert address_of(bytes_of["w"]) == tensor.data_ptr()  # no copy
        assert len(bytes_of["w"]) == spec.nbytes == tensor.numel() * tensor.element_size()
    manifest, arena = served({"w": tensor})
    found = state_dict(arena, manifest.layout)
    check_same(found, {"w": tensor})
    if spec.stride:
        wide = [d for d, count in enumerate(tensor.shape) if count > 1]
        assert [found["w"].stride(d) for d in wide] == [tensor.stride(d) for d in wide]


@given(models(), st.randoms(use_true_random=False))
def test_a_model_is_returned_as_it_was(
    model: dict[str, torch.Tensor], shuffler: random.Random
) -> None:
    manifest, arena = served(model)
    found = state_dict(arena, manifest.layout)
    check_same(found, model)
    for alias in manifest.layout.aliases:
        of = found[alias.target].untyped_storage()
        assert found[alias.name].untyped_storage().data_ptr() == of.data_ptr()
    names = list(model)
    shuffler.shuffle(names)
    assert identity({name: model[name] for name in names}) == manifest.ref.identity.hex()
    # What was pulled, and is served on, is the same model.
    assert identity(found) == manifest.ref.identity.hex()


@given(models())
@settings(max_examples=50)
def test_a_saved_and_loaded_model_has_the_same_identity(model: dict[str, torch.Tensor]) -> None:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert identity(torch.load(file, weights_only=True)) == identity(model)


@given(models())
@settings(max_examples=50)
def test_a_written_model_has_torchs_values(model: dict[str, torch.Tensor]) -> None:
    manifest, arena = served(model)
    owners = {tensor.name: model[tensor.name] for tensor in manifest.layout.tensors}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        written(manifest, arena, out)
        if torch.float8_e8m0fnu not in {t.dtype for t in owners.values()}:  # safetensors lacks it
            check_written(out, owners)
        checkpoint = open_checkpoint(out)
        assert {spec.name: spec.shape for spec in checkpoint.specs} == {
            name: tuple(tensor.shape) for name, tensor in owners.items()
        }
        for alias in checkpoint.aliases:  # ties that the file names
            assert bits(model[alias.name]) == bits(model[alias.target])


@given(tensors(), st.integers(1, 12))
def test_pieces_of_any_length(tensor: torch.Tensor, elements: int) -> None:
    (spec,), _, bytes_of = describe({"w": tensor})
    stored = bytes_of["w"]
    place = Tensor("w", spec.dtype, spec.shape, 0, 0, spec.nbytes, spec.stride)
    most = elements * tensor.element_size()
    rows = b""
    for offset, piece in row_major(place, stored, piece_nbytes=most):
        assert offset == len(rows)
        assert len(piece) <= most or not spec.stride
        rows += piece
    assert list(rows) == bits(tensor)
    again = memoryview(bytearray(spec.nbytes))
    for offset, piece in row_major(place, again, back=True, piece_nbytes=most):
        piece[:] = rows[offset : offset + len(piece)]
    assert again == stored


# -- what engines make ----------------------------------------------------------------------------


class Engine(nn.Module):
    """Weights as engines keep them: a transposed FP8 weight, channels last, a tie, a slice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(48, 32).to(torch.float8_e4m3fn)
        self.fp8 = nn.Parameter(weight.t(), requires_grad=False)
        self.conv = nn.Conv2d(3, 8, 3)
        last = self.conv.weight.detach().contiguous(memory_format=torch.channels_last)
        self.conv.weight = nn.Parameter(last)
        self.embed = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("turned", self.embed.weight.detach().t())
        self.register_buffer("rows", self.fp8.detach()[:, 3:7])
        self.register_buffer("scale", torch.tensor(0.5).expand(4))


def test_weights_as_engines_keep_them(tmp_path: Path) -> None:
    model = Engine()
    manifest, arena = served(model)
    found = {tensor.name: tensor for tensor in manifest.layout.tensors}
    assert (found["fp8"].shape, found["fp8"].stride) == ((32, 48), (1, 32))
    assert found["conv.weight"].stride == (27, 1, 9, 3)
    assert {alias.name: alias.target for alias in manifest.layout.aliases} == {
        "head.weight": "embed.weight",
        "turned": "embed.weight",
        "rows": "fp8",
    }
    pulled = state_dict(arena, manifest.layout)
    check_same(pulled, model.state_dict())
    assert pulled["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    # A write to one is seen in the others.
    pulled["embed.weight"][2, 3] = 7
    assert pulled["turned"][3, 2] == pulled["head.weight"][2, 3] == 7
    for again in (copy_of(model), Engine()):
        assert identity(again) == manifest.ref.identity.hex()
    written(manifest, arena, tmp_path / "out")
    (tie,) = open_checkpoint(tmp_path / "out").aliases
    assert (tie.name, tie.target) == ("head.weight", "embed.weight")  # and not "turned"


def copy_of(model: nn.Module) -> nn.Module:
    """Return a module that was saved and loaded, which `copy.deepcopy` does not do for views."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def test_the_identity_of_a_written_file_differs_in_the_order() -> None:
    weight = torch.arange(12, dtype=torch.int32).reshape(3, 4).t()
    assert identity({"w": weight}) != identity({"w": weight.contiguous()})
    assert identity({"w": weight}) == identity({"w": copy.deepcopy(weight)})


def test_the_strides_of_dimensions_with_one_element_do_not_count() -> None:
    base = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    whole = base.unsqueeze(0).transpose(0, 1)
    one = {"a": base.unsqueeze(1), "b": base.unsqueeze(1), "c": base[:1], "d": base[1:, :1]}
    other = {
        "a": whole,
        "b": whole,
        "c": base[0].unsqueeze(1).t(),
        "d": base[1:, 0].unsqueeze(0).t(),
    }
    assert all(other[name].stride() != tensor.stride() for name, tensor in one.items())
    assert all(torch.equal(other[name], tensor) for name, tensor in one.items())
    assert identity(other) == identity(one)


def test_a_row_major_tensor_owns_what_it_shares_with_a_permuted_one() -> None:
    base = torch.arange(12, dtype=torch.int32).reshape(4, 3)
    (spec,), (alias,), _ = describe({"a": base.t(), "b": base})
    assert spec == TensorSpec("b", "I32", (4, 3))
    assert alias == Alias("a", "b", "I32", (3, 4), 0, (1, 3))


def test_a_permuted_tensor_owns_views() -> None:
    base = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1)
    model = {"w": base, "row": base[1], "last": base[3, 1, 2], "all": base.expand(5, 4, 2, 3)}
    (spec,), aliases, _ = describe(model)
    assert spec == TensorSpec("w", "I16", (4, 2, 3), (1, 12, 4))
    assert {a.name: (a.offset_bytes, a.stride) for a in aliases} == {
        "row": (2, (12, 4)),
        "last": (46, ()),
        "all": (0, (0, 1, 12, 4)),
    }


def test_many_views_of_one_buffer() -> None:
    flat = torch.arange(60_000, dtype=torch.int32)
    model = {f"layers.{i}.w": flat[3 * i : 3 * i + 3] for i in range(20_000)}
    specs, aliases, _ = describe(model)
    assert (len(specs), aliases) == (20_000, [])
    specs, aliases, _ = describe(model | {"flat": flat})
    assert [spec.name for spec in specs] == ["flat"]
    assert len(aliases) == 20_000


def test_aliases_of_nothing() -> None:
    layout = plan_layout(
        [TensorSpec("none", "F32", (0, 4)), TensorSpec("w", "F32", (2, 3), (1, 2))],
        [
            Alias("a", "none", "F32", (4, 0), 0, (1, 1)),
            Alias("b", "w", "F32", (0,), 24, (1,)),
        ],
    )
    found = state_dict(memoryview(bytearray(layout.arena_nbytes)), layout)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "none": (0, 4),
        "a": (4, 0),
        "w": (2, 3),
        "b": (0,),
    }


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "order", "dtype"),
    [
        ((2100, 3000), (1, 0), torch.float8_e4m3fn),
        ((1500, 2000), (1, 0), torch.bfloat16),
        ((2, 3_000_000), (1, 0), torch.uint8),
        ((3_000_000, 2), (1, 0), torch.uint8),
        ((64, 48, 5, 90), (0, 2, 3, 1), torch.float32),
        ((40, 30, 50, 20), (3, 1, 2, 0), torch.complex64),
    ],
)
def test_large_tensors_are_written_in_pieces(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    weight = torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype).permute(order)
    weight[0, 1] = 1
    model = {"before": torch.ones(3), "w": weight, "z": torch.zeros(5, dtype=torch.bool)}
    manifest, arena = served(model)
    assert any(tensor.stride for tensor in manifest.layout.tensors)
    written(manifest, arena, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        for name, tensor in model.items():
            found = file.get_tensor(name)
            assert found.is_contiguous()
            raw = found.contiguous().view(torch.uint8)
            assert torch.equal(raw, tensor.contiguous().view(torch.uint8)), name


def test_a_disk_that_fails_inside_a_permuted_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, arena = served({"w": torch.zeros(3000, 2000, dtype=torch.uint8).t()})
    real, calls = os.pwrite, []

    def failing(fd: int, data: Any, position: int) -> int:
        calls.append(position)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, position)

    writer = CheckpointWriter(tmp_path / "out", manifest)
    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(CapacityError):
        writer.write_layer(0, arena)
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_read_back_as_far_as_it_goes(tmp_path: Path) -> None:
    weight = torch.randint(0, 255, (3000, 2000), dtype=torch.uint8).t()
    manifest, arena = served({"w": weight})
    writer = CheckpointWriter(tmp_path / "out", manifest)
    writer.write_layer(0, arena)
    (file,) = writer.folder.rglob("model.safetensors")
    os.truncate(file, file.stat().st_size - 1_000_000)
    space = memoryview(bytearray(manifest.layout.layers[0].nbytes))
    writer.read_layer(0, space)
    read = torch.frombuffer(space, dtype=torch.uint8).as_strided(weight.shape, weight.stride())
    whole = 4 * (1 << 20) // 3000
    assert torch.equal(read[:whole], weight[:whole])
    assert not read[whole:].any()
    writer.abort()
