"""A kernel like torch's `elementwise_kernel`: it takes a closure over an OffsetCalculator of two
operands by value, and reads as many of its dimensions as that says, up to two."""

from __future__ import annotations

from tests.support.driver.kernels import Image
from tests.support.libraries import assembled, fatbin
from tests.support.torch_structures import CLOSURE

#: Bytes of the closure: a calculator, two addresses, a float and padding.
CLOSURE_BYTES = 528


def _dimension(dim: int) -> str:
    """Return the code of a dimension: the rest of the index, and what is added to both offsets."""
    divider, strides = 4 + 12 * dim, 304 + 8 * dim
    at = f"{CLOSURE}_param_1"
    return f"""
    setp.le.s32 %p2, %r3, {dim};
    @%p2 bra $L__GO;
    ld.param.u32 %r5, [{at}+{divider}];
    ld.param.u32 %r6, [{at}+{divider + 4}];
    ld.param.u32 %r7, [{at}+{divider + 8}];
    mul.wide.u32 %rd1, %r4, %r6;
    shr.u64 %rd1, %rd1, 32;
    cvt.u32.u64 %r8, %rd1;
    add.s32 %r8, %r8, %r4;
    shr.u32 %r8, %r8, %r7;
    mul.lo.s32 %r9, %r8, %r5;
    sub.s32 %r9, %r4, %r9;
    mov.b32 %r4, %r8;
    ld.param.u32 %r10, [{at}+{strides}];
    mad.lo.s32 %r11, %r9, %r10, %r11;
    ld.param.u32 %r10, [{at}+{strides + 4}];
    mad.lo.s32 %r12, %r9, %r10, %r12;"""


_PTX = f""".version 8.0
.target sm_90
.address_size 64
.visible .entry {CLOSURE}(
    .param .u32 {CLOSURE}_param_0,
    .param .align 8 .b8 {CLOSURE}_param_1[{CLOSURE_BYTES}]
)
.reqntid 128
{{
    .reg .pred %p<3>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<6>;
    ld.param.u32 %r1, [{CLOSURE}_param_0];
    mov.u32 %r2, %tid.x;
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra $L__END;
    ld.param.u32 %r3, [{CLOSURE}_param_1];
    mov.b32 %r4, %r2;
    mov.b32 %r11, 0;
    mov.b32 %r12, 0;{_dimension(0)}{_dimension(1)}
$L__GO:
    ld.param.u64 %rd2, [{CLOSURE}_param_1+504];
    ld.param.u64 %rd3, [{CLOSURE}_param_1+512];
    cvt.u64.u32 %rd4, %r11;
    add.s64 %rd2, %rd2, %rd4;
    cvt.u64.u32 %rd4, %r12;
    add.s64 %rd3, %rd3, %rd4;
    ld.global.b32 %r13, [%rd3];
    ld.param.u32 %r14, [{CLOSURE}_param_1+520];
    add.f32 %r13, %r13, %r14;
    st.global.b32 [%rd2], %r13;
$L__END:
    ret;
}}
"""


def image() -> Image:
    """Return the kernel in a fatbin, for a GPU of compute capability 9.0."""
    return Image(CLOSURE, fatbin(assembled(_PTX)), _PTX)
