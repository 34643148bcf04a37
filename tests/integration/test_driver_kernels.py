"""mx's kernels on the stand-in driver: what is loaded, what runs, and what breaks a context."""

from __future__ import annotations

import pytest

from tests.support.driver.kernels import translated
from tests.support.driver.programs import each_major, passes

#: Makes a digester on GPU 0, and a buffer of random bytes there.
_DIGESTER = """
import random
from blake3 import blake3
from mx.cuda import driver as cuda
from mx.cuda.device import Device, DeviceMemory
from mx.cuda.digest import BlockDigester
from mx.errors import MxError
from mx.testing import spans
from mx.transport import DeviceView

gpu = Device(cuda.load(), 0)
data = random.Random(5).randbytes(3 << 20)
memory = DeviceMemory(gpu, len(data))
spans.poke(DeviceView(gpu.key, memory.address, len(data), memory), data)
"""


@each_major
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_digests_are_those_of_the_host(major: int, capability: int) -> None:
    code = """
draw = random.Random(7)
sizes = [1, 15, 63, 64, 65, 1023, 1024, 1025, 2049, (1 << 17) + 5, (1 << 20) - 1, 1 << 20]
sizes += [draw.randint(1, 1 << 20) for _ in range(150)]  # two batches
blocks = [(16 * draw.randrange((len(data) - size) // 16), size) for size in sizes]
digester = BlockDigester(gpu)
got = digester.digests([(memory.address + at, size) for at, size in blocks])
print(got == [blake3(data[at : at + size]).digest() for at, size in blocks])
"""
    settings = {"KERNELS": True, "COMPUTE_CAPABILITY": capability}
    assert passes(major, _DIGESTER + code, **settings) == ["True"]


@each_major
def test_no_other_image_loads(major: int) -> None:
    code = """
from mx.cuda import blake3 as kernels
right = kernels.compiled(90)
use()
print(attempt("cuModuleLoadData", right.cubin[:-1] + bytes([right.cubin[-1] ^ 1])))
print(attempt("cuModuleLoadData", kernels.compiled(80).cubin))
module = call("cuModuleLoadData", right.cubin)
print(attempt("cuModuleGetFunction", module, right.name.encode()))
print(attempt("cuModuleGetFunction", module, b"another"))
"""
    lines = passes(major, code, KERNELS=True)
    assert lines == ["NO_BINARY_FOR_GPU", "NO_BINARY_FOR_GPU", "", "NOT_FOUND"]


@each_major
@pytest.mark.parametrize("address", ["memory.address + memory.nbytes - 16", "4096"])
def test_a_block_beyond_its_memory_breaks_the_context(major: int, address: str) -> None:
    code = f"""
digester = BlockDigester(gpu)
try:
    digester.digests([({address}, 1024)])
except MxError as error:
    print(type(error).__name__, "ILLEGAL_ADDRESS" in str(error))
with gpu.current():
    print(attempt("cuMemAlloc", 8))
"""
    lines = passes(major, _DIGESTER + code, KERNELS=True)
    assert lines == ["CudaError True", "ILLEGAL_ADDRESS"]


def test_an_unknown_instruction_is_refused() -> None:
    ptx = ".entry k(\n)\n{\n\t.reg .b32 %r<3>;\n\tvote.sync.any.pred \t%r1, %r2, -1;\n}\n"
    with pytest.raises(ValueError, match="vote.sync.any.pred is not translated"):
        translated("k", ptx, "k")
