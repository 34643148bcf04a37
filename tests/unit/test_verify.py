"""Memory that is attached is hashed where it is; tests/gpu/test_arena.py does so on a GPU."""

from __future__ import annotations

from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx.core.grid import BLOCK_BYTES
from mx.core.layout import TensorSpec
from mx.core.manifest import encode, plan_layout
from mx.core.types import Manifest, Packaging
from mx.errors import DigestError
from mx.memory.device import HostReader
from mx.memory.verify import check_layer, wrong_tensors
from mx.storage.reader import fill_from_tensors
from tests.support.checkpoints import make_arena

SIZES = {
    "model.layers.0.mlp.a": 5 * BLOCK_BYTES + 17,
    "model.layers.0.mlp.b": 0,
    "model.layers.0.mlp.c": 300,
    "model.layers.1.mlp.d": 2 * BLOCK_BYTES,
}


def model() -> tuple[Manifest, memoryview]:
    """Return a model of two layers, and its arena."""
    layout = plan_layout([TensorSpec(name, "U8", (size,)) for name, size in SIZES.items()])
    arena = make_arena(layout)
    tensors = {
        name: memoryview(bytes([number + 1]) * size)
        for number, (name, size) in enumerate(SIZES.items())
    }
    filled = fill_from_tensors(tensors, layout, arena)
    return encode(layout, Packaging(), filled.roots), arena


MODEL, ARENA = model()


@given(st.data())
def test_each_byte_counts_and_padding_does_not(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ARENA) - 1))
    spoilt = memoryview(bytearray(ARENA))
    spoilt[at] ^= 0x40
    owners = [
        tensor.name
        for tensor in MODEL.layout.tensors
        if 0 <= at - MODEL.layout.layers[tensor.layer].arena_offset - tensor.offset < tensor.nbytes
    ]
    found = []
    with closing(HostReader()) as reader:
        for layer in MODEL.layout.layers:
            try:
                check_layer(MODEL, spoilt, layer.index, reader)
            except DigestError as error:
                found.append(error.message)
    assert len(found) == len(owners)
    assert all(owner in message for owner, message in zip(owners, found, strict=True))


def test_the_first_wrong_tensor_is_named_and_all_are_found() -> None:
    spoilt = memoryview(bytearray(ARENA))
    layer = MODEL.layout.layers[0]
    for offset, nbytes in layer.extents:
        if nbytes:
            spoilt[layer.arena_offset + offset + nbytes - 1] ^= 1
    with closing(HostReader()) as reader:
        space = spoilt[layer.arena_offset : layer.arena_offset + layer.nbytes]
        names = [MODEL.layout.tensors[i].name for i in wrong_tensors(MODEL, 0, space, reader)]
        assert names == [
            tensor.name for tensor in MODEL.layout.tensors if tensor.layer == 0 and tensor.nbytes
        ]
        with pytest.raises(DigestError, match=names[0]):
            check_layer(MODEL, spoilt, 0, reader)
