"""blake3 (plain hash, 32 bytes) of many inputs of 1 byte to 1 MiB at once, as a Triton kernel.

From the BLAKE3 specification (github.com/BLAKE3-team/BLAKE3-specs). An input is cut into chunks of
1024 bytes, and a chunk into 64-byte messages, which are compressed one after another into the
chunk's chaining value, by a thread for each chunk. The chaining values are the leaves of a binary
tree, and a parent is the compression of its two children. A program hashes one input, and goes up
its tree.

All arithmetic is on 32-bit words, little endian. A chaining value `h` is a tuple of 8 tensors, a
message `m` one of 16; their lanes are different chunks or parents. Importing this module imports
triton, so import it only to hash on a device.
"""

# Triton reads the kernels' annotations: no `from __future__ import annotations` here. Functions are
# few and long, since its interpreter takes milliseconds for a call.

import triton
import triton.language as tl

_IV0: tl.constexpr = tl.constexpr(0x6A09E667)
_IV1: tl.constexpr = tl.constexpr(0xBB67AE85)
_IV2: tl.constexpr = tl.constexpr(0x3C6EF372)
_IV3: tl.constexpr = tl.constexpr(0xA54FF53A)
_IV4: tl.constexpr = tl.constexpr(0x510E527F)
_IV5: tl.constexpr = tl.constexpr(0x9B05688C)
_IV6: tl.constexpr = tl.constexpr(0x1F83D9AB)
_IV7: tl.constexpr = tl.constexpr(0x5BE0CD19)
_CHUNK_START: tl.constexpr = tl.constexpr(1)
_CHUNK_END: tl.constexpr = tl.constexpr(2)
_PARENT: tl.constexpr = tl.constexpr(4)
_ROOT: tl.constexpr = tl.constexpr(8)


@triton.jit
def _initial(lanes: tl.constexpr):
    """Return the chaining value that chunks and parents start from."""
    return (
        tl.full((lanes,), _IV0, tl.uint32),
        tl.full((lanes,), _IV1, tl.uint32),
        tl.full((lanes,), _IV2, tl.uint32),
        tl.full((lanes,), _IV3, tl.uint32),
        tl.full((lanes,), _IV4, tl.uint32),
        tl.full((lanes,), _IV5, tl.uint32),
        tl.full((lanes,), _IV6, tl.uint32),
        tl.full((lanes,), _IV7, tl.uint32),
    )


@triton.jit
def _compress(h, m, counter, nbytes, flags, lanes: tl.constexpr):
    """Return the chaining value that follows `h` after a message of `nbytes`, padded with zeros.

    `counter`, `nbytes`, `flags`: int32, one for each lane.
    """
    # The specification's 4 x 4 words by rows.
    a = h[:4]
    b = h[4:]
    c = _initial(lanes)[:4]
    high = tl.zeros((lanes,), tl.uint32)  # of the counter
    d = (counter.to(tl.uint32), high, nbytes.to(tl.uint32), flags.to(tl.uint32))
    # Not a static_range: seven copies take Triton several times as long. LLVM may still unroll it.
    for _ in range(7):
        for half in tl.static_range(2):
            # The rows after G on each column, then on each diagonal.
            a1 = ()
            b1 = ()
            c1 = ()
            d1 = ()
            # Sums wrap; Triton's debug mode would trap there.
            for i in tl.static_range(4):
                p = tl.add(a[i], b[i], sanitize_overflow=False)
                p = tl.add(p, m[8 * half + 2 * i], sanitize_overflow=False)
                s = d[i] ^ p
                s = (s >> 16) | (s << 16)
                r = tl.add(c[i], s, sanitize_overflow=False)
                q = b[i] ^ r
                q = (q >> 12) | (q << 20)
                p = tl.add(p, q, sanitize_overflow=False)
                p = tl.add(p, m[8 * half + 2 * i + 1], sanitize_overflow=False)
                s = s ^ p
                s = (s >> 8) | (s << 24)
                r = tl.add(r, s, sanitize_overflow=False)
                q = q ^ r
                q = (q >> 7) | (q << 25)
                a1 = a1 + (p,)
                b1 = b1 + (q,)
                c1 = c1 + (r,)
                d1 = d1 + (s,)
            # Turning the rows makes columns of the diagonals, and turns them back.
            a = a1
            b = b1[1 + 2 * half :] + b1[: 1 + 2 * half]
            c = c1[2:] + c1[:2]
            d = d1[3 - 2 * half :] + d1[: 3 - 2 * half]
        permuted = (m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13])
        m = permuted + (m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8])
    found = ()
    for i in tl.static_range(4):
        found = found + (a[i] ^ c[i],)
    for i in tl.static_range(4):
        found = found + (b[i] ^ d[i],)
    return found


@triton.jit
def _load(words, offsets, end):
    """Load a message for each lane, as four tiles of 4 words.

    A thread then loads 16 bytes of its own message at a time. `words` points to a multiple of 16
    bytes. `offsets`, each lane's first word, and `end` are multiples of 4; words from `end` on are
    0.
    """
    places = offsets[:, None] + tl.arange(0, 4)[None, :]
    tiles = ()
    for i in tl.static_range(4):
        tiles = tiles + (tl.load(words + places + 4 * i, mask=places + 4 * i < end, other=0),)
    return tiles


@triton.jit
def _message(tiles, lanes: tl.constexpr):
    """Return the message that was loaded as tiles."""
    m = ()
    for i in tl.static_range(4):
        even, odd = tl.split(tl.reshape(tiles[i], (lanes, 2, 2)))
        word0, word2 = tl.split(even)
        word1, word3 = tl.split(odd)
        m = m + (word0, word1, word2, word3)
    return m


@triton.jit
def _cut(m, left):
    """Set the bytes of each lane's message to 0 that follow its first `left` ones."""
    found = ()
    for i in tl.static_range(16):
        here = left - 4 * i
        bits = 8 * tl.minimum(tl.maximum(here, 0), 3)
        found = found + (tl.where(here >= 4, m[i], m[i] & ((1 << bits) - 1).to(tl.uint32)),)
    return found


@triton.jit
def _chosen(condition, x, y):
    """Return `x` where the condition holds, else `y`."""
    found = ()
    for i in tl.static_range(8):
        found = found + (tl.where(condition, x[i], y[i]),)
    return found


@triton.jit
def digest_blocks(
    inputs, lengths, expected, found, wrong, chains, lanes: tl.constexpr, row: tl.constexpr
):
    """Compute the digest of each input, and compare it. Grid: (inputs, 1).

    `inputs`: int64 addresses, multiples of 16; `lengths`: int64 bytes, of which those up to the
    next multiple of 16 are read as well; `expected`, `found`: uint32 [inputs, 8], digests;
    `wrong`: uint32, set to 1 if any input has another digest than is expected; `chains`: uint32
    [inputs, row, 8], the program's own while it runs.
    """
    index = tl.program_id(0)
    nbytes = tl.load(lengths + index).to(tl.int32)
    base = tl.multiple_of(chains + index.to(tl.int64) * (row * 8), 16)
    words = tl.multiple_of(tl.load(inputs + index).to(tl.pointer_type(tl.uint32)), 16)
    end = (nbytes + 15) // 16 * 4
    # An only chunk is the root.
    end_flags = tl.where(nbytes <= 1024, _CHUNK_END | _ROOT, _CHUNK_END)
    for first in range(0, (nbytes + 1023) // 1024, lanes):
        chunk = first + tl.arange(0, lanes)
        left = nbytes - chunk * 1024
        # Lanes after the last chunk compute what is not stored.
        last = (tl.minimum(tl.maximum(left, 1), 1024) - 1) // 64
        count = (tl.minimum(nbytes - first * 1024, 1024) + 63) // 64
        ragged = (nbytes % 16 != 0) & (nbytes <= (first + lanes) * 1024)
        h = _initial(lanes)
        tiles = _load(words, chunk * 256, end)
        for index_in_chunk in range(count):
            m = _message(tiles, lanes)
            # The next message is on its way while this one is compressed.
            following = index_in_chunk + 1
            tiles = _load(words, chunk * 256 + following * 16, tl.where(following < count, end, 0))
            here = left - index_in_chunk * 64
            if ragged:
                m = _cut(m, here)
            flags = tl.where(index_in_chunk == last, end_flags, 0)
            flags = flags | tl.where(index_in_chunk == 0, _CHUNK_START, 0)
            size = tl.minimum(tl.maximum(here, 0), 64)
            h = _chosen(index_in_chunk <= last, _compress(h, m, chunk, size, flags, lanes), h)
        for i in tl.static_range(8):
            tl.store(base + chunk * 8 + i, h[i], mask=left > 0)
    # Neighbours become a parent, and a last one without a neighbour goes up as it is; so left
    # subtrees are the largest complete ones. Parents take the place of children that are read.
    level = (nbytes + 1023) // 1024
    zero = tl.zeros((lanes,), tl.int32)
    while level > 1:
        flags = zero + tl.where(level == 2, _PARENT | _ROOT, _PARENT)
        for first in range(0, (level + 1) // 2, lanes):
            parent = first + tl.arange(0, lanes)
            # Other threads load what these have stored, and store where these load.
            tl.debug_barrier()
            # A message is two chaining values side by side.
            m = _message(_load(base, parent * 16, level * 8), lanes)
            tl.debug_barrier()
            h = _compress(_initial(lanes), m, zero, zero + 64, flags, lanes)
            h = _chosen(parent * 2 + 1 < level, h, m[:8])
            for i in tl.static_range(8):
                tl.store(base + parent * 8 + i, h[i], mask=parent * 2 < level)
        level = (level + 1) // 2
    tl.debug_barrier()
    word = tl.arange(0, 8)
    digest = tl.load(base + word)
    tl.store(found + index * 8 + word, digest)
    differs = digest != tl.load(expected + index * 8 + word)
    tl.store(wrong + tl.zeros((8,), tl.int32), tl.full((8,), 1, tl.uint32), mask=differs)
