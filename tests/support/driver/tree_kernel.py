"""A kernel for graphs of tests, whose parameters are all memory that it reads or writes: the upper
part of blake3's tree. Importing this module imports triton."""

# Triton reads the kernels' annotations: no `from __future__ import annotations` here.

import triton
import triton.language as tl

from mx.cuda.blake3_kernel import (
    _PARENT,
    _ROOT,
    _chosen,
    _compress,
    _initial,
    _load,
    _message,
)

#: Chunks of the longest input, and lanes of a program.
ROW, LANES = 1024, 128
#: Bytes of `chains` for one input: two halves, of which each has room for all chunks.
CHAINS_BYTES = 2 * ROW * 32
SIGNATURE = {"lengths": "*i64", "chains": "*u32", "digests": "*u32"}
CONSTANTS = {"lanes": LANES, "row": ROW}


@triton.jit
def hash_parents(lengths, chains, digests, lanes: tl.constexpr, row: tl.constexpr):
    """Compute digests from the chaining values of chunks. Grid: (inputs, 1).

    `lengths`: int64 bytes; `chains`: uint32 [inputs, 2, row, 8], the chaining values in the first
    half of each input; `digests`: uint32 [inputs, 8]. Neighbours become a parent, and a last one
    without a neighbour goes up as it is; so left subtrees are the largest complete ones. The levels
    are in the two halves of `chains` by turns.
    """
    index = tl.program_id(0)
    count = (tl.load(lengths + index).to(tl.int32) + 1023) // 1024
    base = tl.multiple_of(chains + index.to(tl.int64) * (2 * row * 8), 16)
    level = 0
    while count > 1:
        source = level % 2 * (row * 8)
        parents = (count + 1) // 2
        for first in range(0, parents, lanes):
            parent = first + tl.arange(0, lanes)
            zero = tl.zeros((lanes,), tl.int32)
            # A message is two chaining values side by side.
            m = _message(_load(base + source, parent * 16, count * 8), lanes)
            flags = zero + tl.where(count == 2, _PARENT | _ROOT, _PARENT)
            h = _compress(_initial(lanes), m, zero, zero + 64, flags, lanes)
            h = _chosen(parent * 2 + 1 < count, h, m[:8])
            place = base + (row * 8 - source) + parent * 8
            for i in tl.static_range(8):
                tl.store(place + i, h[i], mask=parent < parents)
        # The next level is loaded by other threads than those that stored it.
        tl.debug_barrier()
        count = parents
        level += 1
    word = tl.arange(0, 8)
    tl.store(digests + index * 8 + word, tl.load(base + level % 2 * (row * 8) + word))
