"""Libraries of mx's kernels for the stand-in: the PTX that Triton makes of them, translated to C.

The stand-in loads a cubin only if the library has its bytes, and runs its translation: so digests
on a device are computed by the instructions of mx's own kernels. What the kernels do not use is not
translated: shared memory, floating point, and what the threads of a warp tell each other.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

_TYPES = {
    "b32": "uint32_t", "u32": "uint32_t", "s32": "int32_t", "pred": "uint32_t",
    "b64": "uint64_t", "u64": "uint64_t", "s64": "int64_t",
}  # fmt: skip
_UNSIGNED = {"int32_t": "uint32_t", "int64_t": "uint64_t"}
_OPERATORS = {
    "add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^",
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "min": "<", "max": ">",
}  # fmt: skip
_SPECIAL = {
    "%tid.x": "t->x",
    "%ntid.x": "t->launch->threads",
    "%ctaid.x": "t->block_x",
    "%ctaid.y": "t->block_y",
    "%ctaid.z": "t->block_z",
}


def source(capability: int) -> str:
    """Return the C source of a library of mx's kernels for one compute capability.

    Args:
        capability: Times ten: 90 is 9.0.

    Raises:
        LocalError: Triton is missing or can't compile the kernels.
        ValueError: A kernel uses an instruction that is not translated.
    """
    import triton

    from mx.cuda import blake3

    ptx: dict[str, str] = {}
    real = triton.compile

    def keep(*arguments: Any, **options: Any) -> Any:
        made = real(*arguments, **options)
        ptx[made.metadata.name] = made.asm["ptx"]
        return made

    with mock.patch("triton.compile", keep):
        compiled = blake3.compiled.__wrapped__(capability)
    kernels = (compiled.chain_chunks, compiled.hash_parents)
    parts = ['#include "blocks.h"\n']
    for kernel in kernels:
        parts.append(translated(kernel.name, ptx[kernel.name]))
        image = ",".join(map(str, kernel.cubin))
        parts.append(f"static const unsigned char {kernel.name}_cubin[] = {{{image}}};\n")
    parts.append('__attribute__((visibility("default"))) struct kernel kernels[] = {')
    for kernel in kernels:
        name = kernel.name
        parts.append(
            f'    {{"{name}", {name}_cubin, sizeof {name}_cubin, {kernel.parameters}, {name}}},'
        )
    return "\n".join([*parts, "    {0},", "};\n"])


def write(folder: Path, capability: int) -> Path:
    """Write the source into a folder, and return its path."""
    path = folder / f"kernels_{capability}.c"
    path.write_text(source(capability))
    return path


def translated(name: str, ptx: str) -> str:
    """Return a function in C, `void NAME(struct launch *)`, that does what a kernel does.

    Args:
        name: The kernel's.
        ptx: Its PTX (PTX ISA, version 8.7).
    """
    body = ptx[ptx.index("{", ptx.index(f".entry {name}(")) + 1 : ptx.rindex("}")]
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
        lines.append(f"    {condition}{{ {_statement(opcode.split('.'), operands)} }}")
    barriers = "true" if "bar.sync" in body else "false"
    lines += ["}", f"static void {name}(struct launch *launch) {{"]
    return "\n".join([*lines, f"    run_grid(launch, {name}_thread, {barriers});", "}\n"])


def _value(operand: str) -> str:
    return _SPECIAL.get(operand) or operand.removeprefix("%")


def _several(operand: str) -> list[str]:
    return [_value(each.strip()) for each in operand.strip("{}").split(",")]


def _statement(opcode: list[str], operands: list[str]) -> str:
    """Return a statement in C for an instruction: its opcode by parts, and its operands."""
    kind = _TYPES.get(opcode[-1], "")
    wide = kind.replace("32", "64")
    unsigned = _UNSIGNED.get(kind, kind)
    first, *others = operands or [""]
    a, b, c = [*map(_value, others), "", "", ""][:3]
    match opcode:
        case ["ld", "param", _]:
            number = others[0].strip("[]").rpartition("_")[2]
            found = f"t->launch->parameters[{number}]"
        case ["ld" | "st" as what, "global", *_]:
            where, values = (others[0], first) if what == "ld" else (first, others[0])
            registers = _several(values)
            nbytes = len(registers) * (8 if kind == "uint64_t" else 4)
            address = where.strip("[] ").replace("%", "")
            moves = [
                f"{each} = at[{number}];" if what == "ld" else f"at[{number}] = {each};"
                for number, each in enumerate(registers)
            ]
            writes = "true" if what == "st" else "false"
            return (
                f"{kind} *at = reach(t, {address}, {nbytes}, {writes}); "
                f"if (!at) return; {' '.join(moves)}"
            )
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
