"""xxh3_128 (seed 0, default secret) of many long inputs at once, as two Triton kernels.

As in the XXH3 specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md, "long input"), eight
64-bit accumulators take an input in stripes of 64 bytes; after each 16 stripes (a unit of 1024
bytes) they are scrambled. Within a unit everything is a sum that does not depend on the
accumulators. So `unit_sums` computes the sums of all units of all inputs in parallel, at memory
speed, 64 bytes for each 1024; `finish` runs the short chain of additions and scrambles, one warp
for each input, and merges the accumulators. Inputs have 241 bytes to 1 MiB and start at a multiple
of 8; `mx.cuda.digest` handles all other blocks.

Importing this module imports triton, so import it only to hash on a device.
"""

# Triton reads the kernels' annotations: no `from __future__ import annotations` here.

import triton
import triton.language as tl

from mx.cuda.xxh3_table import MAX_UNITS, PRIME32_1, PRIME64_1, PRIME64_2

_SCRAMBLE: tl.constexpr = tl.constexpr(16)
_LAST: tl.constexpr = tl.constexpr(24)
_LOW: tl.constexpr = tl.constexpr(32)
_HIGH: tl.constexpr = tl.constexpr(40)
_START: tl.constexpr = tl.constexpr(48)
_ROW: tl.constexpr = tl.constexpr(MAX_UNITS * 8)
_P32_1: tl.constexpr = tl.constexpr(PRIME32_1)
_P64_1: tl.constexpr = tl.constexpr(PRIME64_1)
_P64_2: tl.constexpr = tl.constexpr(PRIME64_2)
_ALL_ONES: tl.constexpr = tl.constexpr((1 << 64) - 1)  # not every Triton has ~ for uint64
_AVALANCHE: tl.constexpr = tl.constexpr(0x165667919E3779F9)


@triton.jit
def _product(key):
    """Return the low half of each key times its high half."""
    low = key.to(tl.uint32).to(tl.uint64)
    high = (key >> 32).to(tl.uint32).to(tl.uint64)
    return low * high


@triton.jit
def unit_sums(inputs, lengths, table, sums, units: tl.constexpr):
    """Compute what each unit adds to the accumulators. Grid: (inputs, MAX_UNITS / units).

    `inputs`: int64 addresses; `lengths`: int64 bytes; `table`: uint64; `sums`: uint64
    [inputs, MAX_UNITS, 8], of which the rows of existing units are written. The last unit counts
    only its whole stripes, without the input's last stripe, which `finish` takes.
    """
    index = tl.program_id(0)
    unit = tl.program_id(1) * units + tl.arange(0, units)
    lane = tl.arange(0, 8)
    before_last = (tl.load(lengths + index) - 1).to(tl.int32)
    full = before_last // 1024
    stripes = tl.where(unit < full, 16, tl.where(unit == full, before_last % 1024 // 64, 0))
    words = tl.load(inputs + index).to(tl.pointer_type(tl.uint64))
    words = words + unit[:, None] * 128 + lane[None, :]
    plain = tl.zeros((units, 8), tl.uint64)
    mixed = tl.zeros((units, 8), tl.uint64)
    for stripe in tl.static_range(16):
        there = (stripes[:, None] > stripe) & (lane[None, :] >= 0)
        data = tl.load(words + stripe * 8, mask=there, other=0)
        key = data ^ tl.load(table + stripe + lane)[None, :]
        mixed += tl.where(there, _product(key), 0)
        plain += data
    # Lane i adds its data to its neighbour, i ^ 1.
    even, odd = tl.split(tl.reshape(plain, (units, 4, 2)))
    total = mixed + tl.reshape(tl.join(odd, even), (units, 8))
    place = sums + index.to(tl.int64) * _ROW + unit[:, None] * 8 + lane[None, :]
    tl.store(place, total, mask=(unit[:, None] <= full) & (lane[None, :] >= 0))


@triton.jit
def _scramble(state, secret):
    return ((state ^ (state >> 47)) ^ secret) * _P32_1


@triton.jit
def _merge(state, table, start):
    """Compute half of a digest: four 128-bit products folded, added up and mixed."""
    pair = tl.arange(0, 4) * 2
    even, odd = tl.split(tl.reshape(state, (4, 2)))
    x = even ^ tl.load(table + pair)
    y = odd ^ tl.load(table + pair + 1)
    half = start + tl.sum((x * y) ^ tl.umulhi(x, y), axis=0)
    half = (half ^ (half >> 37)) * _AVALANCHE
    return half ^ (half >> 32)


@triton.jit
def finish(inputs, lengths, table, sums, digests):
    """Compute the digests from the sums. Grid: (inputs,); one warp is enough.

    `digests`: uint64 [inputs, 2], the high and the low half of each.
    """
    index = tl.program_id(0)
    lane = tl.arange(0, 8)
    length = tl.load(lengths + index)
    full = (length - 1).to(tl.int32) // 1024
    secret = tl.load(table + _SCRAMBLE + lane)
    row = sums + index.to(tl.int64) * _ROW + lane
    state = tl.load(table + _START + lane)
    whole = full // 16 * 16
    for unit in range(0, whole, 16):
        # Unrolled, so that the sums of later units load while earlier ones are used.
        for i in tl.static_range(16):
            state = _scramble(state + tl.load(row + (unit + i) * 8), secret)
    for unit in range(whole, full):
        state = _scramble(state + tl.load(row + unit * 8), secret)
    state += tl.load(row + full * 8)
    # The last 64 bytes, which may start anywhere.
    last = tl.load(inputs + index).to(tl.pointer_type(tl.uint8)) + (length - 64)
    data = tl.zeros((8,), tl.uint64)
    neighbour = tl.zeros((8,), tl.uint64)
    for i in tl.static_range(8):
        data |= tl.load(last + lane * 8 + i).to(tl.uint64) << (8 * i)
        neighbour |= tl.load(last + (lane ^ 1) * 8 + i).to(tl.uint64) << (8 * i)
    state += _product(data ^ tl.load(table + _LAST + lane)) + neighbour
    count = length.to(tl.uint64)
    tl.store(digests + index * 2, _merge(state, table + _HIGH, (count * _P64_2) ^ _ALL_ONES))
    tl.store(digests + index * 2 + 1, _merge(state, table + _LOW, count * _P64_1))
