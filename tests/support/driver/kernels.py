"""Libraries of kernels for the stand-in: the PTX that Triton makes of them, translated to C.

The stand-in loads a cubin only if the library has its bytes, and runs its translation: so digests
on a device are computed by the instructions of mx's own kernels. What the kernels do not use is not
translated. Tests may add kernels of their own (`compiled`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

_TYPES = {
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "pred": "uint32_t",
    "b64": "uint64_t", "f32": "uint32_t", "u64": "uint64_t", "s64": "int64_t",
}  # fmt: skip
_UNSIGNED = {"int32_t": "uint32_t", "int64_t": "uint64_t"}
_OPERATORS = {
    "add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "min": "<", "max": ">",
}  # fmt: skip
#: MOST_WORDS of graphs.h.
_MOST_PARAMETER_BYTES = 192 * 8
_SPECIAL = {
    "%tid.x": "t->x",
    "%ntid.x": "t->launch->threads",
    "%ctaid.x": "t->block_x",
    "%ctaid.y": "t->block_y",
    "%ctaid.z": "t->block_z",
    "global_smem": "0",
}
#: What instructions that compute with floats do. Approximations are the host's, to the last bit or
#: so; a GPU's differ.
_FLOATS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "fma": "fmaf({0}, {1}, {2})", "neg": "-{0}", "abs": "fabsf({0})", "rcp": "1.0f / {0}",
    "max": "fmaxf({0}, {1})", "min": "fminf({0}, {1})", "sqrt": "sqrtf({0})",
    "rsqrt": "1.0f / sqrtf({0})", "ex2": "exp2f({0})", "lg2": "log2f({0})",
}  # fmt: skip


@dataclass(frozen=True)
class Image:
    """A kernel that Triton has compiled: its entry's name, what it is loaded by and made from."""

    name: str
    cubin: bytes
    ptx: str

    @classmethod
    def of(cls, made: Any) -> Image:
        """Return that of a kernel that `triton.compile` has made."""
        return cls(made.metadata.name, made.asm["cubin"], made.asm["ptx"])

    @property
    def parameters(self) -> list[tuple[int, int]]:
        """Offset and size of each parameter, in bytes."""
        found: list[tuple[int, int]] = []
        end = 0
        declared = r"\.param (?:\.align (\d+) )?\.[bfsu](\d+)(?: \w+\[(\d+)\])?"
        for align, width, count in re.findall(declared, self._head):
            nbytes = int(width) // 8
            begin = -(-end // int(align or nbytes)) * int(align or nbytes)
            found.append((begin, nbytes * int(count or 1)))
            end = sum(found[-1])
        return found

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return int(re.findall(r"\.reqntid (\d+)", self._head)[0])

    @property
    def _head(self) -> str:
        begin = self.ptx.index(f".entry {self.name}(")
        return self.ptx[begin : self.ptx.index("{", begin)]


def compiled(
    function: object,
    signature: Mapping[str, str],
    constants: Mapping[str, object],
    capability: int = 90,
    warps: int = 4,
) -> Image:
    """Compile a kernel for a compute capability.

    Args:
        function: What `triton.jit` has made.
        signature: The types of its parameters by name, as Triton writes them: "*fp32", "i32".
        constants: The values of its parameters that are `tl.constexpr`.
        capability: Times ten: 90 is 9.0.
        warps: Warps of a block, of 32 threads.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=function,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
    )
    # A product and a sum that are not fused are the same on every machine.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return Image.of(
        triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    )


def tree(capability: int) -> Image:
    """Return the kernel of `tree_kernel`, which graphs of tests have, for a compute capability."""
    from tests.support.driver import tree_kernel

    made = tree_kernel.hash_parents, tree_kernel.SIGNATURE, tree_kernel.CONSTANTS
    return compiled(*made, capability)


def digests(capability: int) -> list[Image]:
    """Return mx's own kernel for a compute capability, and that of graphs of tests.

    Raises:
        LocalError: Triton is missing or can't compile them.
    """
    import triton

    from mx.cuda import blake3

    found: list[Image] = []
    real = triton.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        found.append(Image.of(made))
        return made

    with mock.patch("triton.compile", keep):
        blake3.compiled.__wrapped__(capability)
    return [*found, tree(capability)]


def source(images: Iterable[Image]) -> str:
    """Return the C source of a library of kernels.

    Raises:
        ValueError: A kernel uses an instruction that is not translated, or has too many parameters.
    """
    parts, table = ['#include "warps.h"\n'], []
    for number, image in enumerate(images):
        name = f"kernel_{number}"
        offsets = [offset for offset, _ in image.parameters]
        if sum(image.parameters[-1]) > _MOST_PARAMETER_BYTES:
            raise ValueError(f"{image.name} has more bytes of parameters than MOST_WORDS")
        parts.append(translated(image.name, image.ptx, name, offsets))
        data = ",".join(map(str, image.cubin))
        parts.append(f"static const unsigned char {name}_cubin[] = {{{data}}};")
        layout = ", ".join(f"{{{offset}, {nbytes}}}" for offset, nbytes in image.parameters)
        parts.append(f"static const uint32_t {name}_layout[][2] = {{{layout}}};\n")
        fields = [f'"{image.name}"', f"{name}_cubin", f"sizeof {name}_cubin"]
        fields += [str(len(image.parameters)), str(image.threads), f"{name}_layout", name]
        table.append(f"    {{{', '.join(fields)}}},")
    parts.append('__attribute__((visibility("default"))) struct kernel kernels[] = {')
    return "\n".join([*parts, *table, "    {0},", "};\n"])


def translated(entry: str, ptx: str, name: str, offsets: Sequence[int] = ()) -> str:
    """Return a function in C, `void NAME(struct launch *)`, that does what a kernel does.

    Args:
        entry: The kernel's name.
        ptx: Its PTX (PTX ISA, version 8.7).
        name: The function's.
        offsets: Those of its parameters, in bytes.
    """
    body = ptx[ptx.index("{", ptx.index(f".entry {entry}(")) + 1 : ptx.rindex("}")]
    lines = [f"static void {name}_thread(struct thread *t) {{"]
    for kind, register, count in re.findall(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;", body):
        every = ", ".join(f"{register}{number} = 0" for number in range(int(count)))
        lines.append(f"    {_TYPES[kind]} {every};")
        lines += [f"    (void){register}{number};" for number in range(int(count))]
    for raw in body.splitlines():
        line = raw.split("//")[0].strip().rstrip(";")
        if not line or line.startswith((".", "{", "}")):
            continue
        if label := re.fullmatch(r"\$(\w+):", line):
            lines.append(f"{label[1]}: __attribute__((unused));")
            continue
        guard = re.match(r"@(!?)%(p\d+)\s+", line)
        condition = f"if ({guard[1]}{guard[2]}) " if guard else ""
        instruction = line[guard.end() :] if guard else line
        opcode, _, rest = instruction.replace("\t", " ").partition(" ")
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest)
        lines.append(f"    {condition}{{ {_statement(opcode.split('.'), operands, offsets)} }}")
    barriers = "true" if "bar.sync" in body or "shfl.sync" in body else "false"
    lines += ["}", f"static void {name}(struct launch *launch) {{"]
    return "\n".join([*lines, f"    run_grid(launch, {name}_thread, {barriers});", "}\n"])


def _value(operand: str) -> str:
    if bits := re.fullmatch("0f([0-9A-F]{8})", operand):
        return f"0x{bits[1]}u"
    return _SPECIAL.get(operand) or operand.removeprefix("%")


def _several(operand: str) -> list[str]:
    return [_value(each.strip()) for each in operand.strip("{}").split(",")]


def _statement(opcode: list[str], operands: list[str], offsets: Sequence[int]) -> str:
    """Return a statement in C for an instruction: its opcode by parts, and its operands; `offsets`
    are those of the kernel's parameters."""
    kind = _TYPES.get(opcode[-1], "")
    wide = kind.replace("32", "64")
    unsigned = _UNSIGNED.get(kind, kind)
    first, *others = operands or [""]
    a, b, c = [*map(_value, others), "", "", ""][:3]
    match opcode:
        case [what, *_, "f32"] if what in _FLOATS:
            found = f"to_bits({_FLOATS[what].format(*(f'to_float({each})' for each in (a, b, c)))})"
        case ["setp", what, "f32"]:
            found = f"to_float({a}) {_OPERATORS[what]} to_float({b})"
        case ["cvt", "rn", "f32", "s32" | "u32" | "s64"]:
            found = f"to_bits((float)({kind}){a})"
        case ["shfl", "sync", "bfly", "b32"]:
            found = f"butterfly(t, {a}, {b})"
        case ["ld", "param", _]:
            number, _, more = others[0].strip("[]").rpartition("_")[2].partition("+")
            at = offsets[int(number)] + int(more or 0)
            found = f"*(const {kind} *)((const char *)t->launch->parameters + {at})"
        case ["ld" | "st" as what, "global" | "shared" as space, *_]:
            where, values = (others[0], first) if what == "ld" else (first, others[0])
            registers = _several(values)
            nbytes = len(registers) * (8 if kind == "uint64_t" else 4)
            address = where.strip("[] ").replace("%", "").replace("global_smem", "0")
            moves = [
                f"{each} = at[{number}];" if what == "ld" else f"at[{number}] = {each};"
                for number, each in enumerate(registers)
            ]
            writes = "true" if what == "st" else "false"
            reaches = f"reach(t, {address}, {nbytes}, {writes})"
            found = reaches if space == "global" else f"share(t, {address}, {nbytes})"
            return f"{kind} *at = {found}; if (!at) return; {' '.join(moves)}"
        case ["mov", _] if first.startswith("{"):
            low, high = _several(first)
            halves = {low: f"(uint32_t){a}", high: f"(uint32_t)({a} >> 32)"}
            halves.pop("_", None)  # PTX's sink
            return " ".join(f"{register} = {half};" for register, half in halves.items())
        case ["mov", _] if others[0].startswith("{"):
            low, high = _several(others[0])
            found = f"(uint64_t){low} | (uint64_t){high} << 32"
        case ["mov", _]:
            found = a
        case ["add" | "sub" | "and" | "or" | "xor" as what, _]:
            found = f"({unsigned}){a} {_OPERATORS[what]} ({unsigned}){b}"
        case ["mul", "wide", _]:
            found = f"({wide})({kind}){a} * ({kind}){b}"
        case ["mul", "lo", _]:
            found = f"({unsigned}){a} * ({unsigned}){b}"
        case ["mad", "lo", _]:
            found = f"({unsigned}){a} * ({unsigned}){b} + ({unsigned}){c}"
        case ["div" | "rem" as what, _]:
            found = f"({kind}){a} {'/' if what == 'div' else '%'} ({kind}){b}"
        case ["mad", "wide", _]:
            found = f"({wide})({kind}){a} * ({kind}){b} + ({wide}){c}"
        case ["shl", _]:
            found = f"({kind}){a} << {b}"
        case ["shr", _]:
            found = f"({kind}){a} >> {b}"
        case ["shf", "l", "wrap", _]:
            found = f"(uint32_t)((((uint64_t){b} << 32 | {a}) << ({c} & 31)) >> 32)"
        case ["not", "pred"]:
            found = f"!{a}"
        case ["not", _]:
            found = f"~({kind}){a}"
        case ["min" | "max" as what, _]:
            first_wins = f"({kind}){a} {_OPERATORS[what]} ({kind}){b}"
            found = f"{first_wins} ? ({unsigned}){a} : ({unsigned}){b}"
        case ["selp", _]:
            found = f"{c} ? ({unsigned}){a} : ({unsigned}){b}"
        case ["setp", what, _]:
            found = f"({kind}){a} {_OPERATORS[what]} ({kind}){b}"
        case ["cvt", to, _]:
            found = f"({_TYPES[to]})({kind}){a}"
        case ["bra", *_]:
            return f"goto {first.removeprefix('$')};"
        case ["bar", "sync"]:
            return "barrier(t);"
        case ["ret"]:
            return "return;"
        case _:
            raise ValueError(f"{'.'.join(opcode)} is not translated")
    return f"{_value(first)} = {found};"
