"""Small shared libraries with fatbins of kernels, as CUDA's compiler makes them."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import tempfile
from pathlib import Path

from tests.support.driver.build import compiler


def library(path: Path, build_id: str, kernels: str | bytes = "kernels\0") -> Path:
    """Compile a shared library with a build id ("0xab", or "none") and kernels, and return it."""
    source, data = path.with_suffix(".c"), path.with_suffix(".bin")
    data.write_bytes(kernels.encode() if isinstance(kernels, str) else kernels)
    section = f'.pushsection .nv_fatbin, \\"a\\"\\n.balign 8\\n.incbin \\"{data}\\"\\n.popsection'
    text = f'__asm__("{section}");' if kernels else ""
    source.write_text(text + "\nint one(void) { return 1; }\n")
    note = f"-Wl,--build-id={build_id}"
    subprocess.run([compiler() or "cc", "-shared", note, source, "-o", path], check=True)
    return path


def fatbin(*bodies: bytes, arch: int = 90, kind: int = 2, flags: int = 0x11) -> bytes:
    """Return a fatbin with an entry for each body; `flags` may say that they are compressed."""
    entries = b""
    for body in bodies:
        padded = body + bytes(-len(body) % 8)
        packed = len(body) if flags & 0xA000 else 0
        expanded = len(_zstd("ZSTD_decompress", body)) if flags & 0x8000 else 0
        head = struct.pack("<HHIQII", kind, 0x101, 64, len(padded), packed, 0)
        head += struct.pack("<HHIII", 1, 8, arch, 0, 0)
        entries += head + struct.pack("<QQQ", flags, 0, expanded) + padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def compressed(body: bytes) -> bytes:
    """Return bytes compressed by zstd."""
    return _zstd("ZSTD_compress", body, 3)


def _zstd(name: str, data: bytes, *level: int) -> bytes:
    call = getattr(ctypes.CDLL("libzstd.so.1"), name)
    call.restype = ctypes.c_size_t
    made = ctypes.create_string_buffer(1 << 22)
    nbytes = call(made, ctypes.c_size_t(len(made)), data, ctypes.c_size_t(len(data)), *level)
    return made.raw[:nbytes]


#: A kernel that counts in a variable of its module, and one with text and an empty object.
COUNTER = ".visible .global .align 4 .u32 counter;"
HARMLESS = """.global .align 1 .b8 $str[4] = {97, 98, 99, 0};
.global .align 1 .b8 _ZN33_INTERNAL_01_5_one_cu_02_334cuda3std3__45__cpo5beginE[1];"""


def cubin(variables: str, used: str, space: str = "global") -> bytes:
    """Return what NVIDIA's assembler makes of a kernel that uses a variable."""
    ptx = f""".version 8.0
.target sm_90
.address_size 64
{variables}
.visible .entry add() {{
    .reg .b32 %r<2>;
    .reg .b64 %rd<2>;
    mov.u64 %rd1, {used};
    ld.{space}.u8 %r1, [%rd1];
    st.global.u8 [%rd1], %r1;
    ret;
}}
"""
    return assembled(ptx)


def assembled(ptx: str) -> bytes:
    """Return what NVIDIA's assembler makes of PTX for sm_90."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "a.ptx"), Path(folder, "a.cubin")
        source.write_text(ptx)
        subprocess.run([assembler, "-arch=sm_90", source, "-o", out], check=True)
        return out.read_bytes()
