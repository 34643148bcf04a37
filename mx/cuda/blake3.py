"""Compiles the kernel of `mx.cuda.blake3_kernel` for a GPU.

Triton compiles it ahead of the launch (a few seconds, then kept in its own cache), and the driver
launches it on mx's streams: neither torch nor a C compiler is needed.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from mx.errors import LocalError

#: Bytes of a chunk: a leaf of blake3's tree, which one thread hashes.
CHUNK_BYTES = 1024
#: Chunks of the longest input, 1 MiB.
MAX_CHUNKS = 1024
#: Chunks that a program hashes at a time, one for each of its threads.
PROGRAM_CHUNKS = 256
#: The kernel loads units of so many bytes: inputs start at a multiple of it.
UNIT_BYTES = 16
DIGEST_BYTES = 32
#: Bytes of `chains` for one input.
CHAINS_BYTES = MAX_CHUNKS * DIGEST_BYTES
_POINTERS = {
    **{"inputs": "*i64", "lengths": "*i64"},
    **dict.fromkeys(("expected", "found", "wrong", "chains"), "*u32"),
}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A compiled kernel.

    `parameters` is its number of 64-bit parameters: its own, then those that Triton adds for
    scratch memory, which this kernel does not need; they stay 0.
    """

    name: str
    cubin: bytes
    threads: int
    shared_nbytes: int
    parameters: int


@functools.cache
def compiled(capability: int) -> CompiledKernel:
    """Return the kernel `digest_blocks` for a compute capability (90 is 9.0).

    Raises:
        LocalError: Triton is missing or can't compile it.
    """
    try:
        from triton import TritonError

        from mx.cuda import blake3_kernel
    except ImportError as error:
        raise LocalError(
            f"digests on a GPU need Triton, which can't be imported: {error}",
            hint="pip install triton (it comes with torch for CUDA)",
        ) from error
    try:
        return _compile(blake3_kernel.digest_blocks, capability)
    except (TritonError, RuntimeError, OSError) as error:
        raise LocalError(
            f"Triton could not compile the digest for compute capability {capability / 10}: "
            f"{error}",
            hint="use the Triton that came with your torch",
        ) from error


def is_compiled() -> bool:
    """Return True if this process has the kernel, for some compute capability."""
    return compiled.cache_info().currsize > 0


def _compile(function: object, capability: int) -> CompiledKernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own, threads = len(_POINTERS), PROGRAM_CHUNKS
    source = ASTSource(
        fn=function,
        signature={**_POINTERS, "lanes": "constexpr", "row": "constexpr"},
        constexprs={(own,): threads, (own + 1,): MAX_CHUNKS},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": threads // 32, "enable_fp_fusion": False},
    )
    name = str(made.metadata.name)
    entry = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", made.asm["ptx"], re.DOTALL)
    parameters = entry[1].count(".param") if entry else 0
    if parameters < own:
        raise RuntimeError(f"{name} takes {parameters} parameters, not {own}")
    return CompiledKernel(name, made.asm["cubin"], threads, int(made.metadata.shared), parameters)
