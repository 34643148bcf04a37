"""Compiles the kernels of `mx.cuda.xxh3_kernel` for a GPU.

Triton compiles them ahead of the launch (a second or two, then kept in its own cache), and the
driver launches them on mx's streams: neither torch nor a C compiler is needed.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from mx.cuda.xxh3_table import PROGRAM_UNITS
from mx.errors import LocalError


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel.

    `parameters` is its number of 64-bit parameters: its own, then those that Triton adds for
    scratch memory, which these kernels do not need; they stay 0.
    """

    name: str
    cubin: bytes
    threads: int
    shared_nbytes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Xxh3Kernels:
    """The two kernels of a digest."""

    unit_sums: Kernel
    finish: Kernel


@functools.cache
def compiled(capability: int) -> Xxh3Kernels:
    """Return the kernels for a compute capability (90 is 9.0).

    Raises:
        LocalError: Triton is missing or can't compile them.
    """
    try:
        from triton import TritonError

        from mx.cuda import xxh3_kernel as kernels
    except ImportError as error:
        raise LocalError(
            f"digests on a GPU need Triton, which can't be imported: {error}",
            hint="pip install triton (it comes with torch for CUDA)",
        ) from error
    pointers = {"inputs": "*i64", "lengths": "*i64", "table": "*u64", "sums": "*u64"}
    try:
        return Xxh3Kernels(
            _compile(
                kernels.unit_sums,
                {**pointers, "units": "constexpr"},
                {"units": PROGRAM_UNITS},
                capability,
                warps=4,
            ),
            _compile(kernels.finish, {**pointers, "digests": "*u64"}, {}, capability, warps=1),
        )
    except (TritonError, RuntimeError, OSError) as error:
        raise LocalError(
            f"Triton could not compile the digest for compute capability {capability / 10}: "
            f"{error}",
            hint="use the Triton that came with your torch",
        ) from error


def _compile(
    function: object,
    signature: dict[str, str],
    constants: dict[str, int],
    capability: int,
    *,
    warps: int,
) -> Kernel:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(signature)
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    name = str(made.metadata.name)
    entry = re.search(rf"\.entry {re.escape(name)}\((.*?)\)", made.asm["ptx"], re.DOTALL)
    parameters = entry[1].count(".param") if entry else 0
    wanted = len(signature) - len(constants)
    if parameters < wanted:
        raise RuntimeError(f"{name} takes {parameters} parameters, not {wanted}")
    return Kernel(name, made.asm["cubin"], 32 * warps, int(made.metadata.shared), parameters)
